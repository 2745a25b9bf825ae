"""scripts/bench/{checkpoint,operations}.py do what they say, at tiny sizes."""

import argparse
import shutil
from pathlib import Path

import pytest

from megazero.config.schema import Model
from scripts.bench import checkpoint, operations
from scripts.bench.harness import run

TINY = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 64}


@pytest.mark.parametrize("megabytes", [20, 100, 500, 2000])
def test_a_state_is_about_as_large_as_asked_for(megabytes: float, tmp_path: Path):
    group, *_ = checkpoint.groups_of("save", checkpoint.model_of(megabytes), str(tmp_path), ["*"])
    size = float(group.title.split()[2])
    assert size == pytest.approx(megabytes, rel=0.15)


def test_titles_of_large_states_differ_by_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(checkpoint, "TOGETHER", 0)
    groups = list(checkpoint.groups_of("stall", checkpoint.model_of(20), str(tmp_path), ["*"]))
    assert [group.title.partition(" MB ")[2] for group in groups] == ["(1 of 2)", "(2 of 2)"]
    assert [[one.name for one in group.systems] for group in groups] == [
        ["dcp-stall", "dcp-stager-stall"],
        ["dcp-stall", "ours-stall"],
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_saves_and_loads_of_all_systems(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = Model.model_validate(TINY | {"seq_len": 256, "vocab": 8192, "dropout": 0.0})
    told = {"only": ["*"], "launches": 1, "pairs": 2, "json": False, "save": False}
    for kind in checkpoint.KINDS:
        assert run(checkpoint.groups_of(kind, model, str(tmp_path), ["*"]), argparse.Namespace(**told)) == 0
    assert "| dcp-stager-stall | " in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_rows_of_operations_say_whose_a_run_takes():
    names = ["layer_norm", *(beside + "layer_norm" for beside in (operations.LIMIT, operations.TORCH))]
    rows = [pair.row for pair in operations.pairs_of("bf16", names)]
    assert rows == ["layer_norm (auto: ours), of the limit", "layer_norm (auto: ours), of torch's"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_every_operation_is_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operations, "_keep_freed_memory", lambda: None)
    (system,) = operations.group_of("bf16", 1).systems
    calls = system.build(*system.arguments)
    assert isinstance(calls, dict) and {call() for call in calls.values()} == {0.0}
    assert len(operations.pairs_of("bf16", calls)) > 40
