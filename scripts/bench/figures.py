"""Keep what benchmarks measured in docs/figures, and write it as tables.

One file a script, `docs/figures/zero.json`: a list of reports, one for each title, each with the commit, the date, the
machine, the versions and the command line that it comes from. `scripts/tables.py` writes the tables of the documents.
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
    """Return where figures come from: commit, date, machine, versions, command line.

    Args:
        arguments: of the process, its script first.
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
    """Return the commit that is checked out, with a "+" where files differ from it; None outside of a repository."""
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
    import torch

    import megazero

    return {"python": platform.python_version(), "torch": torch.__version__, "megazero": megazero.__version__}


def keep(script: str, report: Report) -> None:
    """Put a report into a script's file, in the place of the one with the same title."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{script}.json"
    reports = [one for one in read(path) if one["title"] != report["title"]]
    reports.append(report)
    path.write_text(json.dumps(reports, indent=1) + "\n")


def read(path: Path) -> list[Report]:
    """Return the reports of a file; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def merged(reports: Sequence[Report]) -> Report:
    """Return the reports of one run as one: all rows, each with its group's title, the rest of the first report."""
    rows = [row | {"group": one["title"]} for one in reports for row in one["rows"]]
    return dict(reports[0]) | {"rows": rows, "loss_difference": reports[-1]["loss_difference"]}


def whole(report: Report) -> str:
    """Return a report for people: title, table, and what is to be known of it."""
    return f"{report['title']}\n\n{table(report)}\n\n{notes(report)}"


def report_of(
    title: str, rows: list[dict[str, Any]], *, launches: int, rounds: int = 1, foreign: Sequence[float] = ()
) -> Report:
    """Return the report of the running script on some rows, with where they come from.

    Args:
        rows: each has "system", and figures by head in "columns", or all that a row of `harness.rows_of` has, or both.
        launches: how often everything was started.
        rounds: in each launch.
        foreign: of each round the share of the machine's processors that other processes took; none: not known.
    """
    share = {"median": statistics.median(foreign), "most": max(foreign)} if foreign else None
    told = {"launches": launches, "rounds": rounds, "floor_s": None, "loss_difference": None, "foreign": share}
    return about(sys.argv) | {"title": title} | told | {"rows": rows}


def tell(reports: Iterable[Report], *, as_json: bool, save: bool) -> int:
    """Print reports as they come, or all as one JSON object; keep them if asked to. Return the exit code."""
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
    """Return what is to be known of a table: where it comes from, how often was measured, how far losses differ."""
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
    """Return the figures that only the rows of some scripts have, by the heads of their columns."""
    return row.get("columns", {})


def _figures(row: dict[str, Any]) -> list[str]:
    if row.get("ratio") is None:
        return [""] * 6
    low, high = row["ci95"]
    interval = f"{low:.3f} to {high:.3f}" if high is not None else "one launch"
    megabytes = [_number(row.get(key), 0) for key in ("built_mb", "peak_mb")]
    return [f"{row['ratio']:.3f}", interval, f"{row['seconds']:.4g}", f"{row['spread']:.1%}", *megabytes]


def _rounded(value: float | None) -> str:
    """Return a figure with three digits, or as many as are before its point."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return _number(value, max(0, digits))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
