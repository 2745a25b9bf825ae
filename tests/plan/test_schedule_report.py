"""The bytes of a schedule are those of a run's ledger; the verb shows and draws it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.__main__ import main
from megazero.comm.grid import Grid
from megazero.plan.job import Job
from megazero.plan.schedule_report import report
from megazero.schedules.actions import COMPUTE
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, job_on, planned
from tests.ranks import run_ranks
from tests.schedules.parsed import parsed
from tests.tiny_run import ROOT, TinyData

SHAPE = replace(SHAPES["gpt"], layers=4)
UNTIED = replace(SHAPE, tie_embeddings=False)


def one_step(grid: Grid, layout: Job, shape) -> dict[str, dict[str, dict[str, int]]]:
    rank = Rank(grid, layout, shape, Precision())
    rank.engine.begin_step()
    rank.passes(0)
    sent = rank.grid.comm.ledger.traffic_as_dict()
    rank.engine.finish_step(lr=1e-3)
    return sent


LAYOUTS = [
    job_on(1, 2, False, 4, 1, pipeline=2, schedule="zb-h1"),
    job_on(2, 2, True, 4, 2, pipeline=2, schedule="gpipe"),
    job_on(1, 2, False, 4, 3, pipeline=2, schedule="interleaved", chunks=2),
]


@pytest.mark.parametrize("shape", [SHAPE, pytest.param(UNTIED, marks=pytest.mark.full)], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.schedule}-tp{x.tensor}-zero{x.stage}")
def test_the_bytes_are_what_the_ledger_counts(layout: Job, shape) -> None:
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    ledgers = run_ranks(layout.ranks, one_step, layout, shape, **axes)
    found, _, _ = report(planned(layout, shape, Precision()))
    per_stage = layout.tensor * layout.data
    for number, ledger in enumerate(ledgers):
        expected = found["ranks"][number // per_stage]["bytes"]

        def sent(axis: str, *purposes: str, ledger=ledger) -> int:
            return sum(ledger.get(axis, {}).get(purpose, {"bytes_sent": 0})["bytes_sent"] for purpose in purposes)

        assert sent("pipeline", "activations", "gradients") == expected["sent"]
        assert sent("data", "gradients") == expected["reduced"]
        assert sent("data", "parameters") == expected["gathered"]
        assert sent("ends", "tied") == expected["tied"]


def test_the_verb_shows_lists_bubble_and_bytes(
    tiny_data: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("parallel.pipeline=2", "pipeline.schedule=zb-h1", "zero.stage=3", "batch.micro=1")
    verb = ["schedule", "--config", str(tiny_data.config), "--nproc", "4", "--all", *options]
    assert main(verb) == 0
    text = capsys.readouterr().out
    assert "zb-h1 over 2 ranks, 2 micro-batches" in text
    lists = [line.partition(": ")[2].split() for line in text.splitlines() if re.match(r"rank \d+:", line)]
    assert [len([a for a in map(parsed, words) if a.kind in COMPUTE]) for words in lists] == [6, 6]
    for name in ("timeline.svg", "timeline.png"):
        assert main([*verb, "--draw", str(tmp_path / name), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["ranks"][0]["actions"] == lists[0] and found["ranks"][0]["peak_live"] == 2
    assert (tmp_path / "timeline.svg").read_text().startswith("<?xml")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--draw", "a.pdf"), "MZ-100 schedule: --draw a.pdf: expected a name that ends in .svg or .png"),
        (("--draw", "/nowhere/a.svg"), "MZ-405 schedule: /nowhere/a.svg: No such file"),
        (("--nproc", "3"), "MZ-106: expected world % (parallel.tensor * parallel.pipeline) == 0, got 3 % (1 * 2) = 1"),
        (("pipeline.schedule=interleaved", "pipeline.chunks=1"), "pipeline.chunks >= 2 with pipeline.schedule interl"),
        (("model.layers=1",), "model.layers >= parallel.pipeline * pipeline.chunks"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tiny_data: TinyData, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    assert main(["schedule", "--config", str(tiny_data.config), "parallel.pipeline=2", *words]) != 0
    assert line in capsys.readouterr().err


def test_what_actions_mean_comes_before_them_and_they_are_cut(
    tiny_data: TinyData, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("parallel.pipeline=2", "pipeline.schedule=zb-h1", "batch.micro=1", "batch.global=64")
    verb = ["schedule", "--config", str(tiny_data.config), *options]
    assert main(verb) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("rank 0: "))
    assert any("F forward, B backward" in line for line in lines[:first])
    assert lines[first].endswith(" ...") and len(lines[first]) <= 60
    assert "--all shows all actions: 2 ranks, up to " in lines[-1]
    assert main([*verb, "--all"]) == 0
    whole = capsys.readouterr().out
    assert len(max(whole.splitlines(), key=len)) > 1000 and "..." not in whole and "--all" not in whole


def test_no_torch_is_needed() -> None:
    code = "import sys; from megazero.__main__ import main; "
    code += "sys.exit(main(sys.argv[1:]) + ('torch' in sys.modules))"
    line = [sys.executable, "-c", code, "schedule", "--config", "tiny", "--json"]
    assert subprocess.run(line, cwd=ROOT, capture_output=True).returncode == 0
