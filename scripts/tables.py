"""Write the tables of the documents from docs/figures, which benchmarks write with --save.

    python scripts/tables.py            # writes them
    python scripts/tables.py --check    # writes nothing; exits with 1 if a table differs or is too old

A table is between two lines of a document:

    <!-- figures zero: small (1 of 4) -->
    <!-- figures zero: small (1 of 4); rows ours-stage0 | ddp -->      only these systems, without the notes
    <!-- end -->

A table is too old if more than 60 later commits changed what it measures: megazero/ or scripts/bench/. Measure it again
or delete it. `gpu_NAME.json`, a report of scripts/gpu_check.sh, becomes the page `gpu_NAME.md`.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from scripts.bench.figures import FIGURES, ROOT, Report, notes, read, table
from scripts.gpu_check.findings import markdown

MOST_COMMITS = 60
MEASURED = ("megazero", "scripts/bench")
_BEGIN = re.compile(r"<!-- figures (?P<script>\w+): (?P<title>[^;]+?)(; rows (?P<rows>[^;]+?))? -->")
_END = "<!-- end -->"


@dataclass(frozen=True)
class Marker:
    """A line that asks for a table.

    Attributes:
        rows: the systems to show; empty: all, followed by the notes.
    """

    script: str
    title: str
    rows: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> "Marker | None":
        """Parse a line; return None if it is not a marker."""
        found = _BEGIN.fullmatch(line.strip())
        if found is None:
            return None
        rows = tuple(name.strip() for name in (found["rows"] or "").split("|") if name.strip())
        return cls(found["script"], found["title"], rows)


class FigureError(ValueError):
    """A document asks for figures that do not exist, or a table has no end."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; report what is wrong")
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
    """Return the files that may have tables: the README and docs/*.md."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written(text: str, figures: Path) -> tuple[str, list[Marker]]:
    """Return a document with its tables rewritten, and their markers.

    Raises:
        FigureError: a table has no end, or has no figures.
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


def report_of(marker: Marker, figures: Path) -> Report:
    """Return the report of a marker's table."""
    found = next((one for one in read(figures / f"{marker.script}.json") if one["title"] == marker.title), None)
    if found is None:
        raise FigureError(f"docs/figures/{marker.script}.json has no {marker.title!r}")
    return found


def too_old(markers: Sequence[Marker], figures: Path) -> Iterator[str]:
    """Yield a line for each table that is too old."""
    for marker in markers:
        commit = str(report_of(marker, figures)["commit"]).rstrip("+")
        later = commits_since(commit)
        if later is None or later > MOST_COMMITS:
            age = "is an unknown commit" if later is None else f"was followed by {later} commits that changed megazero"
            yield f"{marker.script}: {marker.title}: {commit} {age}; measure the table again or delete it"


def commits_since(commit: str) -> int | None:
    """Return how many commits after a commit changed what the tables measure; None if the commit is unknown."""
    line = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *MEASURED]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
