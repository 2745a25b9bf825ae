"""Keep the results of benchmarks in docs/figures, and format them as tables.

Each script has one file, such as `docs/figures/zero.json`: a list of reports, one per title, each with its commit,
date, machine, versions and command line. `scripts/tables.py` writes the tables of the documents from these files.
"""

import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs/figures"

Report = dict[str, Any]


def about(arguments: Sequence[str]) -> Report:
    """Return the origin of figures: commit, date, machine, versions, command line.

    Args:
        arguments: the command line of the process, beginning with its script.
    """
    script = Path(arguments[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    kept = [word for word in arguments[1:] if word not in ("--save", "--json")]
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(["python", name, *kept]),
    }


def commit() -> str | None:
    """Return the commit that is checked out, followed by "+" if files differ from it; None outside of a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip()) if head.returncode == 0 else None


def machine() -> str:
    """Return processor, usable cores and memory of this machine."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and megazero."""
    import torch

    import megazero

    return {"python": platform.python_version(), "torch": torch.__version__, "megazero": megazero.__version__}


def keep(script: str, report: Report) -> None:
    """Write a report to the script's file; it replaces the report with the same title."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{script}.json"
    reports = [one for one in read(path) if one["title"] != report["title"]]
    reports.append(report)
    path.write_text(json.dumps(reports, indent=1) + "\n")


def read(path: Path) -> list[Report]:
    """Return the reports of a file; none if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else []


def merged(reports: Sequence[Report]) -> Report:
    """Merge the reports of one run: all rows, each with its group's title; other fields from the first report."""
    rows = [row | {"group": one["title"]} for one in reports for row in one["rows"]]
    return dict(reports[0]) | {"rows": rows, "loss_difference": reports[-1]["loss_difference"]}


def whole(report: Report) -> str:
    """Return a report as text: title, table, and notes."""
    return f"{report['title']}\n\n{table(report)}\n\n{notes(report)}"


def report_of(
    title: str, rows: list[dict[str, Any]], *, launches: int, rounds: int = 1, foreign: Sequence[float] = ()
) -> Report:
    """Return the report of the running script on some rows, with their origin.

    Args:
        rows: each has "system", and figures by column head in "columns", or the fields of `harness.rows_of`, or both.
        launches: how often all processes were started.
        rounds: number in each launch.
        foreign: per round, the share of the machine's processors that other processes took; empty: unknown.
    """
    share = {"median": statistics.median(foreign), "most": max(foreign)} if foreign else None
    told = {"launches": launches, "rounds": rounds, "floor_s": None, "loss_difference": None, "foreign": share}
    return about(sys.argv) | {"title": title} | told | {"rows": rows}


def tell(reports: Iterable[Report], *, as_json: bool, save: bool) -> int:
    """Print each report when it is ready, or all as one JSON object; keep them if `save`. Return the exit code."""
    told = []
    for one in reports:
        told.append(one)
        if save:
            keep(Path(sys.argv[0]).stem, one)
        if not as_json:
            print(whole(one), end="\n\n", flush=True)
    if as_json:
        print(json.dumps(merged(told), indent=1))
    return 0


def table(report: Report) -> str:
    """Return the rows of a report in Markdown."""
    rows = report["rows"]
    timed, own = any("ratio" in row for row in rows), list(dict.fromkeys(head for row in rows for head in _own(row)))
    bounded, carried = any("bound" in row for row in rows), any(row.get("transport") for row in rows)
    heads = ["system", *["ratio", "95 % interval", "step s", "spread", "MB built", "MB steady"] * timed, *own]
    heads += ["bytes through"] * carried + ["bound"] * bounded
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        cells = [*_figures(row) * timed, *(_rounded(_own(row).get(head)) for head in own)]
        cells += [row.get("transport", "")] * carried + [_number(row.get("bound"), 3)] * bounded
        if "reason" in row:
            cells[0] = row["reason"]
        lines.append(_line([row["system"], *cells]))
    return "\n".join(lines)


def notes(report: Report) -> str:
    """Return the notes of a table: its origin, the numbers of launches and rounds, how far losses differ."""
    text = f"`{report['command']}` on `{report['commit']}`, {report['date']}, {report['machine']}, "
    text += f"torch {report['versions']['torch']}: {report['launches']} launches"
    text += f" of {report['rounds']} rounds" * (report["rounds"] > 1)
    if report["loss_difference"] is not None:
        text += f"; losses within {report['loss_difference']:.1e}"
    if report["floor_s"] is not None:
        text += f"; 1.000 = {report['floor_s']:.3f} s"
    if (foreign := report["foreign"]) is not None:
        text += f"; other processes took {foreign['median']:.0%} of the processors, at most {foreign['most']:.0%}"
    return f"{text}."


def _own(row: dict[str, Any]) -> dict[str, float | None]:
    """Return the figures of a row's extra columns, by column head."""
    return row.get("columns", {})


def _figures(row: dict[str, Any]) -> list[str]:
    if row.get("ratio") is None:
        return [""] * 6
    low, high = row["ci95"]
    interval = f"{low:.3f} to {high:.3f}" if high is not None else "one launch"
    megabytes = [_number(row.get(key), 0) for key in ("built_mb", "peak_mb")]
    return [f"{row['ratio']:.3f}", interval, f"{row['seconds']:.4g}", f"{row['spread']:.1%}", *megabytes]


def _rounded(value: float | None) -> str:
    """Format a figure with three significant digits, or with all digits before the point if those are more."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return _number(value, max(0, digits))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
