"""The tables of the documents are what docs/figures holds, and not too old."""

import json
import subprocess
from pathlib import Path

import pytest

from scripts import tables
from scripts.bench.figures import notes, table
from scripts.tables import FigureError, Marker, documents, too_old, written

ROW = {"ratio": 1.0, "ci95": [0.9, 1.1], "seconds": 0.5, "spread": 0.1, "peak_mb": 10.0, "built_mb": 20.0}
REPORT = {
    "title": "small (1 of 2)",
    "commit": "0123456789",
    "command": "python scripts/bench/zero.py",
    "date": "2026-01-01",
    "machine": "a machine",
    "versions": {"torch": "2.13"},
    "launches": 3,
    "rounds": 7,
    "floor_s": 0.5,
    "loss_difference": 1e-7,
    "foreign": {"median": 0.01, "most": 0.02},
    "rows": [{"system": "ours-stage1, small", **ROW}, {"system": "ddp", **ROW, "ratio": 1.25}],
}
BEGIN = "<!-- figures zero: small (1 of 2)"


def whole_history() -> bool:
    """Whether all commits are here: an archive and a shallow clone cannot tell how old a figure is."""
    line = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(line, cwd=tables.ROOT, capture_output=True, text=True).stdout.strip() == "false"


with_history = pytest.mark.skipif(not whole_history(), reason="not all commits are here")


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    (tmp_path / "zero.json").write_text(json.dumps([REPORT]))
    return tmp_path


def test_documents_have_the_tables_of_the_figures():
    for path in documents():
        text = path.read_text()
        assert written(text, tables.FIGURES)[0] == text, f"{path}: run python scripts/tables.py"


@with_history
def test_no_table_is_too_old():
    faults = [
        fault for path in documents() for fault in too_old(written(path.read_text(), tables.FIGURES)[1], tables.FIGURES)
    ]
    assert faults == []


def test_a_table_is_written_and_then_stays(figures: Path):
    once, markers = written(f"text\n{BEGIN} -->\nanything\n<!-- end -->\nmore", figures)
    assert markers == [Marker("zero", "small (1 of 2)", ())]
    assert once.startswith(f"text\n{BEGIN} -->\n\n| system | ratio |") and once.endswith("\n<!-- end -->\nmore")
    assert "| ddp | 1.250 | 0.900 to 1.100 |" in once and "3 launches of 7 rounds" in once
    assert written(once, figures)[0] == once
    assert written(once.replace("1.250", "1.150"), figures)[0] == once  # a figure that somebody changed


def test_a_table_may_have_columns_of_its_own():
    own = {"system": "plan", "columns": {"s": 1.5, "MB": 123456.7, "small": 0.01234, "none": 0.0}}
    text = table({"rows": [own, {"system": "other", "columns": {"s": None}}]})
    assert text.splitlines()[0] == "| system | s | MB | small | none |"
    assert text.splitlines()[2:] == ["| plan | 1.50 | 123,457 | 0.0123 | 0 |", "| other |  |  |  |  |"]
    timed = {**REPORT, "rows": [{"system": "ours", **ROW, "columns": {"MB/s": 3.25}}]}
    head, _, row = table(timed).splitlines()
    assert head.endswith("| MB steady | MB/s |") and row.endswith("| 10 | 3.25 |")
    assert "of 1 rounds" not in notes({**REPORT, "rounds": 1, "foreign": None}) and "took" in notes(REPORT)


def test_rows_can_be_chosen(figures: Path):
    text, _ = written(f"{BEGIN}; rows ddp -->\n<!-- end -->", figures)
    assert "| ddp |" in text and "ours-stage1" not in text and "launches" not in text
    text, _ = written(f"{BEGIN}; rows ddp | ours-stage1, small -->\n<!-- end -->", figures)
    assert text.index("| ddp |") < text.index("| ours-stage1, small |")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (f"{BEGIN} -->", "no <!-- end --> follows"),
        ("<!-- figures zero: wide -->\n<!-- end -->", "has no 'wide'"),
        ("<!-- figures one: small -->\n<!-- end -->", "one.json has no"),
        (f"{BEGIN}; rows fsdp9 -->\n<!-- end -->", "has no row 'fsdp9'"),
    ],
)
def test_a_table_without_figures_is_an_error(line: str, fault: str, figures: Path):
    with pytest.raises(FigureError, match=fault):
        written(line, figures)


def test_a_table_may_be_sixty_commits_old(figures: Path, monkeypatch: pytest.MonkeyPatch):
    markers = written(f"{BEGIN} -->\n<!-- end -->", figures)[1]
    for behind, faults in ((60, 0), (61, 1), (None, 1)):
        monkeypatch.setattr(tables, "commits_since", lambda commit, behind=behind: behind)
        assert len(list(too_old(markers, figures))) == faults


@with_history
def test_commits_are_counted():
    assert tables.commits_since("HEAD") == 0 and tables.commits_since("0" * 40) is None
