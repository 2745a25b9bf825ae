"""Write the tables of the documents from docs/figures, which benchmarks keep with --save.

    python scripts/tables.py            # writes them
    python scripts/tables.py --check    # writes nothing; exits with 1 and says what differs, or is too old

A table stands between two lines of a document:

    <!-- figures zero: small (1 of 4) -->
    <!-- figures zero: small (1 of 4); rows ours-stage0 | ddp -->      of these systems alone, without the command
    <!-- figures zero: small (1 of 4); old: no machine of that kind is here any more -->
    <!-- end -->

A table whose commit lies more than 60 commits back is too old, unless its line says why it stays. `gpu_NAME.json`, a
report of scripts/gpu_check.sh, becomes the page `gpu_NAME.md`.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder, uninstalled too

from scripts.bench.figures import FIGURES, ROOT, Report, notes, read, table
from scripts.gpu_check.findings import markdown

MOST_COMMITS = 60
_BEGIN = re.compile(
    r"<!-- figures (?P<script>\w+): (?P<title>[^;]+?)(; rows (?P<rows>[^;]+?))?(; old: (?P<old>[^;]+?))? -->"
)
_END = "<!-- end -->"


@dataclass(frozen=True)
class Marker:
    """A line that asks for a table.

    Attributes:
        rows: the systems to show; none: all of them, and where the figures come from.
        old: why the table may be old; None: it may not.
    """

    script: str
    title: str
    rows: tuple[str, ...]
    old: str | None

    @classmethod
    def of(cls, line: str) -> "Marker | None":
        found = _BEGIN.fullmatch(line.strip())
        if found is None:
            return None
        rows = tuple(name.strip() for name in (found["rows"] or "").split("|") if name.strip())
        return cls(found["script"], found["title"], rows, found["old"])


class FigureError(ValueError):
    """An error for a document that asks for figures that are not there."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is wrong")
    options = parser.parse_args()
    faults = []
    pages = {ROOT / "docs" / f"{path.stem}.md": path for path in sorted(FIGURES.glob("gpu_*.json"))}
    for path in [*pages, *(path for path in documents() if path not in pages)]:
        before = path.read_text() if path.exists() else ""
        made = markdown(json.loads(pages[path].read_text())) if path in pages else before
        after, markers = written(made, FIGURES)
        if options.check:
            faults += [f"{path.name}: differs from docs/figures; run python scripts/tables.py"] * (after != before)
            faults += [f"{path.name}: {fault}" for fault in too_old(markers, FIGURES)]
        elif after != before:
            path.write_text(after)
    print("\n".join(faults), end="\n" * bool(faults))
    return int(bool(faults))


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written(text: str, figures: Path) -> tuple[str, list[Marker]]:
    """Return a document with its tables written again, and their markers.

    Raises:
        FigureError: a table has no end, or there are no figures for it.
    """
    out: list[str] = []
    markers: list[Marker] = []
    lines = iter(text.split("\n"))
    for line in lines:
        out.append(line)
        if (marker := Marker.of(line)) is None:
            continue
        markers.append(marker)
        out += ["", *shown(marker, figures), ""]
        if next((rest for rest in lines if rest == _END), None) is None:
            raise FigureError(f"{line}: no {_END} follows")
        out.append(_END)
    return "\n".join(out), markers


def shown(marker: Marker, figures: Path) -> Iterator[str]:
    """Yield the lines of a table."""
    report = report_of(marker, figures)
    if marker.rows:
        known = {row["system"]: row for row in report["rows"]}
        if missing := [name for name in marker.rows if name not in known]:
            raise FigureError(f"{marker.script}: {marker.title} has no row {missing[0]!r}")
        yield table({**report, "rows": [known[name] for name in marker.rows]})
        return
    yield table(report)
    yield ""
    yield notes(report)
    if marker.old is not None:
        yield f"This table is old: {marker.old}."


def report_of(marker: Marker, figures: Path) -> Report:
    found = next((one for one in read(figures / f"{marker.script}.json") if one["title"] == marker.title), None)
    if found is None:
        raise FigureError(f"docs/figures/{marker.script}.json has no {marker.title!r}")
    return found


def too_old(markers: Sequence[Marker], figures: Path) -> Iterator[str]:
    """Yield a line for each table that is too old and does not say why."""
    for marker in markers:
        commit = str(report_of(marker, figures)["commit"]).rstrip("+")
        behind = commits_since(commit)
        if marker.old is None and (behind is None or behind > MOST_COMMITS):
            age = "an unknown commit" if behind is None else f"{behind} commits back"
            yield f"{marker.script}: {marker.title}: {commit} is {age}; measure again, or say why: old: REASON"


def commits_since(commit: str) -> int | None:
    """Return how many commits came after one; None: it is not known here."""
    line = ["git", "rev-list", "--count", f"{commit}..HEAD"]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
