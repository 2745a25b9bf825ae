"""What a run of stages, or of changed options, meets at its edges: its end moved, a short validation set, old files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.__main__ import main
from megazero.checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from megazero.checkpoint.store import Store
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.observe.jsonl import read_rows
from megazero.tools.training.launch import launch
from tests.run.going_on import LINE, go_on
from tests.tiny_run import TinyData, repeating


@pytest.fixture(scope="module")
def made(tiny_data: TinyData, paths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on the first source."""
    folder = tmp_path_factory.mktemp("made") / "run"
    assert launch(tiny_data.load(folder, *LINE, f"data.train={paths['first']}", "run.steps=3"), "small", 1) == 0
    return folder


def named(paths: dict[str, Path], *names: str) -> tuple[str, ...]:
    return "data.train=null", f"data.sources={json.dumps([{'path': str(paths[n]), 'name': n} for n in names])}"


def sights(run: Path, capsys: Any, *asked: str) -> list[dict[str, Any]]:
    """What `megazero data` finds."""
    capsys.readouterr()
    assert main(["data", "--run", str(run), *asked, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def edit(folder: Path, change: Callable[[Manifest], dict[str, Any]]) -> None:
    manifest = read_manifest(folder)
    (folder / FILE_NAME).write_bytes(manifest.model_copy(update=change(manifest)).to_bytes())


@pytest.mark.parametrize(
    "last",
    [
        "batch: {global: 2}",
        *(pytest.param(text, marks=pytest.mark.full) for text in ("model: {seq_len: 16}", "optimizer: {lr: 5e-4}")),
    ],
)
def test_a_run_whose_last_stage_ended_with_it_gets_longer(
    tiny_data: TinyData, paths, tmp_path: Path, last: str
) -> None:
    """`run.steps` may change: behind the stage the config holds, as in a run that was as long from the beginning."""
    stages = f'stages=[{{until_step: 3, {last}, data: {{sources: [{{path: "{paths["second"]}", name: second}}]}}}}]'
    options = (*LINE, *named(paths, "first", "second"), stages, "schedule.cooldown=0")
    for steps in (3, 5):
        more = (f"run.steps={steps}", f"checkpoint.resume={'auto' if steps > 3 else 'none'}")
        assert launch(tiny_data.load(tmp_path / "run", *options, *more), "small", 1) == 0
    assert launch(tiny_data.load(tmp_path / "whole", *options, "run.steps=5"), "small", 1) == 0
    rows = [[repeating(row) for row in read_rows(tmp_path / each / "metrics.jsonl")] for each in ("run", "whole")]
    assert rows[0] == rows[1] and len(rows[0]) == 5


def test_a_validation_set_too_short_for_a_later_stage(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """It is found when the stage begins; the steps before are saved."""
    with IndexedDatasetWriter(tmp_path / "short", np.dtype(np.uint16)) as writer:
        writer.append(np.arange(40))
        writer.end_document()
    line = ["train", "--config", str(tiny_data.config), *LINE]
    stages = "stages=[{until_step: 2, model: {seq_len: 64}}]"
    sets = ([f"data.valid={tmp_path / 'short'}"], [f'data.validation=[{{path: "{tmp_path / "short"}"}}]'])
    for given in sets:
        for options in ([stages], [stages.replace("64", "32"), "model.seq_len=64"]):
            run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
            assert main([*line, f"run.dir={run}", *options, *given]) == 1
            err = capsys.readouterr().err
            assert err.startswith("MZ-207 ") and "short" in err and err.count("\n") == 1, err
            assert Store(run / "checkpoints").steps()[:1] == ([] if options == [stages] else [2])


def test_options_that_change_twice_behind_one_step(tiny_data: TinyData, paths, run: Path, tmp_path: Path) -> None:
    """A run that began at another's step has saved that step with its first change."""
    new, data = tmp_path / "new", f"data.train={paths['first']}"
    began = (data, f"checkpoint.resume={run}", "run.steps=3", "batch.global=8")
    assert go_on(tiny_data, new, *began, allow="batch.global") == 0
    assert go_on(tiny_data, new, data, "run.steps=4", "batch.global=2", allow="batch") == 0
    steps = [(change["from"], change["to"]) for change in read_manifest(new / "checkpoints/step_00000004").history]
    assert steps == [(4, 8), (8, 2)]
    assert read_rows(new / "metrics.jsonl")[-1]["samples"] == 3 * 4 + 2


def test_checkpoints_older_than_an_option(tiny_data: TinyData, paths, run: Path, capsys) -> None:
    """They had its default: no change to keep account of."""
    for step in (1, 2, 3):
        folder = run / f"checkpoints/step_{step:08d}"
        edit(folder, lambda m: {"config": {k: v for k, v in m.config.items() if k not in ("data.pack", "stages")}})
    assert sights(run, capsys, "--step", "2")
    assert go_on(tiny_data, run, f"data.train={paths['first']}", "run.steps=4", allow="data,optimizer") == 0
    assert read_manifest(run / "checkpoints/step_00000004").history == []


def test_a_step_of_a_time_when_sources_had_no_names(tiny_data: TinyData, paths, run: Path, capsys) -> None:
    """And of one with a source that is gone."""
    assert go_on(tiny_data, run, *named(paths, "first", "second"), "run.steps=5", allow="data") == 0
    assert go_on(tiny_data, run, f"data.train={paths['first']}", "run.steps=6", allow="data") == 0
    seen = [{piece["source"] for piece in sights(run, capsys, "--step", str(step))} for step in (2, 4, 6)]
    assert seen[0] == seen[2] == {None} and seen[1] <= {"first", "second"}
