"""What goes wrong, and what the user reads: every row of the table in docs/operations.md is injected here.

python -m tests.faults.test_table      prints the table

In a line `…` stands for anything; RUN is the run's folder, DATA the data set's prefix.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest

from megazero.__main__ import main
from megazero.checkpoint.store import Store
from tests.faults import before, checkpoints, running
from tests.faults.site import FAULTS, Fault, Site
from tests.tiny_run import ROOT, TinyData

assert before and checkpoints and running, "their rows, in this order"

SLOW = ("a rank stopped", "a rank that exits early", "one rank's disk full")  # the launcher's own tests have them too


def row(fault: Fault) -> str:
    mark = "``" if "`" in fault.line else "`"
    return f"| {fault.what} | {mark}{fault.line.replace('|', '/')}{mark} | {fault.lost} | {fault.code} |"


def table() -> str:
    return "\n".join(["| what | the line | what is lost | exit |", "|---|---|---|---|", *map(row, FAULTS)])


@pytest.fixture(scope="module")
def saved(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    line = ["train", "--config", str(tiny_data.config), f"run.dir={folder}", "checkpoint.every=2"]
    assert main(line) == 0
    return folder


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.full] * (fault.what in SLOW)) for fault in FAULTS],
    ids=[fault.what.replace(" ", "-") for fault in FAULTS],
)
def test_one_line_says_it(fault: Fault, saved: Path, tiny_data: TinyData, tmp_path: Path, monkeypatch, capfd) -> None:
    site = Site(tmp_path, tiny_data, monkeypatch)
    shutil.copytree(saved, site.run)
    line = fault.inject(site)
    capfd.readouterr()
    code = main(line)
    monkeypatch.undo()
    err = capfd.readouterr().err
    assert code == fault.code, err
    last = err.splitlines()[-1]
    expected = fault.line.replace("RUN", str(site.run)).replace("DATA", str(tmp_path / "data"))
    if fault.what == "a data file damaged while training":
        expected = fault.line.replace("DATA", str(tiny_data.train))
    assert re.fullmatch(".*".join(map(re.escape, expected.split("…"))), last), f"\n{last}\n{expected}"
    assert len(last.removeprefix("warning: ").removesuffix("; going on from an older step")) <= 300
    if "fault of our own" not in fault.what:
        assert err.count("\n") == (3 if fault.what == "every checkpoint damaged" else 1), err
    if fault.code == 0 and "step" in expected:
        assert Store(site.run / "checkpoints").steps()[0] == 6, "the run has gone on to its end"


def test_the_table_is_in_the_page() -> None:
    assert len(FAULTS) >= 40
    assert table() in (ROOT / "docs/operations.md").read_text(encoding="utf-8"), "python -m tests.faults.test_table"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
