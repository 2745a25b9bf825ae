"""The README's first screen: its figures are those of the pages it names, its configs fit, its picture is drawn so."""

import re
import shlex
from pathlib import Path

import pytest

from megazero.__main__ import main
from megazero.config.file import load
from megazero.plan.machines import MACHINES
from megazero.tools.planning.job import plan
from tests.tiny_run import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURE = re.compile(r"\d[\d,.]*(?:e-?\d+)?%?")


def results() -> list[list[str]]:
    """Cells of the table of results."""
    rows = [line for line in README.splitlines() if line.startswith("| ") and "[table](docs/" in line]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_it_is_short_and_says_what_there_is_before_how():
    lines = README.splitlines()
    assert len(lines) <= 110
    first = README.split("\n## ")[0]
    assert len(first.splitlines()) <= 25 and "megazero.shard(" in first and "train.py --config" in first
    assert "NCCL between several GPUs has not run yet" in README


def test_five_results_are_those_of_their_pages():
    assert len(results()) >= 5
    for what, figures, how in results():
        command, page = re.fullmatch(r"`(.+)`, \[table\]\((docs/[a-z_]+\.md)#[a-z0-9-]+\)", how).groups()
        text = (ROOT / page).read_text(encoding="utf-8")
        assert command.removeprefix("megazero ") in text, "the page has the whole command"
        numbers = FIGURE.findall(figures)
        assert numbers, what
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number.rstrip('.,'))}(?!\d)", text), (what, number, page)


def test_small_configs_fit_on_a_laptop():
    for small in ("tiny", "quickstart"):
        assert plan(load(small), 1, MACHINES["a100-80gb"]).fullest.peak < 1e9 and f"`{small}`" in README


def test_the_picture_is_drawn_by_the_command_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (shown,) = re.findall(r"^!\[.+\]\((docs/pictures/[\w-]+\.svg)\)$", README, re.MULTILINE)
    assert (ROOT / shown).stat().st_size < 150_000
    text = " ".join(README.split())
    (command,) = re.findall(rf"`python -m megazero ([^`]+ --draw {re.escape(shown)})`", text)
    drawn = tmp_path / "drawn.svg"
    assert main([*shlex.split(command)[:-1], str(drawn)]) == 0
    capsys.readouterr()
    # Names within the file differ from one drawing to the next.
    paths = [re.findall(r' d="([^"]+)"', path.read_text(encoding="utf-8")) for path in (ROOT / shown, drawn)]
    assert len(paths[0]) > 40 and paths[0] == paths[1]
