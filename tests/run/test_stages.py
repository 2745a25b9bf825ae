"""Stages of other sources: each begins with its step on every grid and after every restart, and no text comes twice."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megazero.__main__ import main
from megazero.base.errors import UserError
from megazero.config.file import load
from megazero.config.stages import stage_ends
from megazero.data.loader import BatchLoader
from megazero.observe.jsonl import read_rows
from megazero.run.data import open_data
from megazero.tools.certify.tolerances import LOSS_FP32, difference
from megazero.tools.training.launch import launch
from tests.sources import options
from tests.tiny_run import TinyData, command, repeating

FULL = pytest.mark.full
STEPS = ("run.steps=9", "checkpoint.every=1", "data.valid=null", "model.dropout=0.1")


@pytest.fixture(scope="module")
def staged(paths: dict[str, Path]) -> tuple[str, ...]:
    """The first source alone for three steps, then the config's three, and from the seventh step the last two."""
    first = {"path": str(paths["first"]), "name": "first"}
    last = [
        {"path": str(paths[name]), "name": name, "weight": weight} for name, weight in (("second", 1), ("third", 3))
    ]
    stages = [
        {"until_step": 3, "data": {"sources": [first]}},
        {"until_tokens": 6 * 4 * 32 - 5},
        {"until_step": 9, "data": {"sources": last}},
    ]
    return (*options(paths), f"stages={json.dumps(stages)}")


@pytest.fixture(scope="module")
def whole(tiny_data: TinyData, staged, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert launch(tiny_data.load(folder, *STEPS, *staged), "small", 1) == 0
    return folder


def test_a_stage_ends_with_its_step_or_tokens() -> None:
    assert list(stage_ends([(3, None, 128), (None, 512, 128), (None, 513, 128)])) == [3, 4, 5]
    assert list(stage_ends([(None, 129, 128), (None, 400, 64), (7, None, 1)])) == [2, 5, 7], "each with its own batch"


def test_sources_of_each_step(tiny_data: TinyData, staged, tmp_path: Path) -> None:
    config = tiny_data.load(tmp_path, *STEPS, *staged)
    mixture = open_data(config).mixture
    of, windows = mixture.locate(np.arange(40).reshape(10, 4))
    assert [sorted(set(row.tolist())) for row in of[:3]] == [[0]] * 3
    assert np.bincount(of[3:6].ravel(), minlength=3).tolist() == [6, 4, 2]
    assert np.bincount(of[6:9].ravel(), minlength=3).tolist() == [0, 3, 9]
    assert set(of[9].tolist()) <= {0, 1, 2}, "after the last stage the config holds"
    for source in range(3):
        own = windows[of == source]
        assert len(set(own.tolist())) == len(own)


@pytest.mark.parametrize(
    "grid", [(2, 2), *(pytest.param(g, marks=FULL) for g in ((1, 4), (1, 1), (2, 1), (4, 1), (1, 2)))]
)
def test_six_grids_read_the_same(tiny_data: TinyData, staged, tmp_path: Path, grid: tuple[int, int]) -> None:
    mixture, (ranks, micro) = open_data(tiny_data.load(tmp_path, *STEPS, *staged)).mixture, grid
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        loader = BatchLoader(mixture, global_batch=4, micro_batch=micro, data_rank=rank, num_data=ranks)
        for batch in (batch for step in range(10) for batch in loader.step(step)):
            found |= {int(id_): batch.tokens_SB[:, b].tolist() for b, id_ in enumerate(batch.sample_ids_B)}
        loader.close()
    sources, windows = mixture.locate(np.arange(40))
    for id_, source, window in zip(range(40), sources, windows, strict=True):
        assert found[id_] == mixture.sources[source].windows.read(int(window))[0][:-1].tolist()
    assert len(found) == 40


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=FULL) for step in (2, 5, 6, 7))])
def test_a_restart_anywhere_is_bitwise(tiny_data: TinyData, staged, whole: Path, tmp_path: Path, step: int) -> None:
    again = Path(shutil.copytree(whole, tmp_path / "run"))
    for later in range(step + 1, 10):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    assert launch(tiny_data.load(again, *STEPS, *staged, "checkpoint.resume=auto"), "small", 1) == 0
    rows = [[repeating(row) for row in read_rows(folder / "metrics.jsonl")] for folder in (whole, again)]
    assert rows[0] == rows[1] and len(rows[0]) == 9
    shards = [(folder / "checkpoints/step_00000009/shard_00000.safetensors").read_bytes() for folder in (whole, again)]
    assert shards[0] == shards[1]


@pytest.mark.parametrize(
    "grid",
    [
        ("--nproc", "2", "batch.micro=1", "zero.stage=2"),
        pytest.param(("--nproc", "4", "batch.micro=1", "zero.stage=3"), marks=pytest.mark.full),
        pytest.param(("parallel.tensor=2", "parallel.sequence=true"), marks=pytest.mark.full),
        pytest.param(("parallel.pipeline=2", "batch.micro=1"), marks=pytest.mark.full),
        pytest.param(("--nproc", "4", "parallel.pipeline=2", "batch.micro=1"), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_another_grid_from_the_middle_of_a_stage(
    tiny_data: TinyData, staged, whole: Path, tmp_path: Path, grid: tuple[str, ...]
) -> None:
    again = Path(shutil.copytree(whole, tmp_path / "run"))
    for later in range(5, 10):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    line = ("train.py", "--config", tiny_data.config, *STEPS, *staged, f"run.dir={again}", "checkpoint.resume=auto")
    done = command(*line, *grid)
    assert (done.returncode, done.stderr) == (0, "")
    rows, expected = (read_rows(folder / "metrics.jsonl") for folder in (again, whole))
    assert [(row["samples"], row["epochs"]) for row in rows] == [(row["samples"], row["epochs"]) for row in expected]
    assert difference([row["loss"] for row in rows], [row["loss"] for row in expected]) <= LOSS_FP32


def test_other_stages_are_other_data(tiny_data: TinyData, staged, whole: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(whole, tmp_path / "run"))
    other = [option.replace('"until_step": 3', '"until_step": 2') for option in staged]
    assert other != list(staged)
    with pytest.raises(UserError, match=r"MZ-412 .*data 3 sources, xxh3 \w+ -> 3 sources"):
        launch(tiny_data.load(again, *STEPS, *other, "run.steps=10", "checkpoint.resume=auto"), "small", 1)


def test_what_is_said_and_kept(tiny_data: TinyData, staged, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    assert launch(tiny_data.load(folder, *STEPS, *staged), "small", 1) == 0
    out = capsys.readouterr().out
    assert "data first 100 %; from step 4 first 50 %, second 33.33 %, third 16.67 %; from step 7 second 25 %, " in out
    config = load(str(folder / "config.yaml"))
    assert config.stages is not None and [stage.until_step for stage in config.stages] == [3, None, 9]
    assert main(["data", "--run", str(folder), "--step", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {part["source"] for part in found} <= {"second", "third"}
