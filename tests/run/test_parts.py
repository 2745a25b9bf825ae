"""Stages that change batch, length, optimizer, schedule and data: exact on every grid and after every restart."""

import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.__main__ import main
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.data.loader import BatchLoader
from megazero.observe.jsonl import read_rows
from megazero.run import parts
from megazero.run.build import build_trainer
from megazero.run.data import open_data
from megazero.tools.certify.tolerances import LOSS_FP32, difference
from megazero.tools.training.launch import launch
from megazero.zero.gather import Gather
from tests.sources import cut, options
from tests.tiny_run import TinyData, command, repeating

FULL = pytest.mark.full
STEPS = 8
LINE = ("model.position=rotary", "model.seq_len=64", "batch.global=8", "batch.micro=1", "optimizer.lr=2e-3")
LINE += (f"run.steps={STEPS}", "checkpoint.every=1", "data.valid=null", "model.dropout=0.1")
# Of each step: sequences, their length.
SHAPES = [(4, 32), (4, 32), (8, 32), (8, 32), (8, 64), (8, 64), (8, 64), (8, 64)]
GRIDS = [
    ("--nproc", "2", "zero.stage=2"),
    pytest.param(("--nproc", "4", "zero.stage=3"), marks=pytest.mark.full),
    pytest.param(("parallel.tensor=2", "parallel.sequence=true"), marks=pytest.mark.full),
    pytest.param(("parallel.pipeline=2",), marks=pytest.mark.full),
    pytest.param(("--nproc", "4", "parallel.pipeline=2", "zero.stage=1"), marks=pytest.mark.full),
    pytest.param(("--nproc", "4", "parallel.tensor=2"), marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def staged(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two steps of a small batch of one source, two with another optimizer, two of longer windows; then the config."""
    paths = cut(tiny_data, tmp_path_factory.mktemp("sources"))
    one, *rest = ({"path": str(paths[name]), "name": name, "weight": 1 + k} for k, name in enumerate(paths))
    stages = [
        {"until_step": 2, "data": {"sources": [one]}, "model": {"seq_len": 32}, "batch": {"global": 4}},
        {
            "until_tokens": 2 * 4 * 32 + 2 * 8 * 32 - 3,
            "model": {"seq_len": 32},
            "optimizer": {"betas": [0.8, 0.9], "lr": 1e-3, "weight_decay": 0.0, "eps": 1e-6, "clip": 0.5},
        },
        {"until_step": 6, "data": {"sources": rest, "mask_eod": True}, "schedule": {"decay": "constant"}},
    ]
    return (*LINE, *options(paths), f"stages={json.dumps(stages)}")


@pytest.fixture(scope="module")
def whole(tiny_data: TinyData, staged, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert launch(tiny_data.load(folder, *staged), "small", 1) == 0
    return folder


def read(config: Config, ranks: int, micro: int) -> dict[int, list[list[int]]]:
    """The tokens of every sample, by step, as the ranks of a data axis read them."""
    course, found = Course(config), dict[int, list[list[int]]]()
    for part in course.parts:
        data, batch = open_data(part.config, course), part.config.batch.global_
        for rank in range(ranks):
            options = {"begins": (part.first, part.samples), "ends": part.end, "others": data.others}
            sizes = {"global_batch": batch, "micro_batch": micro, "data_rank": rank, "num_data": ranks}
            loader = BatchLoader(data.mixture, **sizes, **options)
            for step in range(part.first, part.end):
                rows = found.setdefault(step, [[] for _ in range(batch)])
                for each in loader.step(step):
                    for b, sample in enumerate(each.sample_ids_B.tolist()):
                        rows[sample - course.samples(step)] = each.tokens_SB[:, b].tolist()
            loader.close()
    return found


def test_which_text_a_step_has(tiny_data: TinyData, staged, tmp_path: Path) -> None:
    """Each length has its own passes: in one no window of a source comes twice, whatever stages it was in."""
    config = tiny_data.load(tmp_path, *staged)
    course, seen = Course(config), set[tuple[int, int, int]]()
    shares = []
    for step, (batch, length) in enumerate(SHAPES):
        mixture = open_data(course.part(step).config, course).mixtures[length]
        sources, windows = mixture.locate(course.samples(step) + np.arange(batch))
        here = {(length, source, window) for source, window in zip(sources.tolist(), windows.tolist(), strict=True)}
        assert len(here) == batch and not here & seen
        seen |= here
        shares.append(np.bincount(sources, minlength=3))
    assert [shares[step].tolist() for step in (0, 1)] == [[4, 0, 0]] * 2
    for first, weights in ((2, [3, 2, 1]), (4, [0, 2, 3]), (6, [3, 2, 1])):
        expected = 16 * np.array(weights) / sum(weights)
        assert (np.abs(shares[first] + shares[first + 1] - expected) < 1).all(), "exact in each stage"
    orders = [open_data(config).mixtures[length].sources[0].seed for length in (32, 64)]
    assert orders[0] != orders[1], "an order of its own"


@pytest.mark.parametrize(
    "grid", [(2, 2), *(pytest.param(g, marks=FULL) for g in ((1, 4), (1, 1), (2, 1), (4, 1), (1, 2)))]
)
def test_six_grids_read_the_same(tiny_data: TinyData, staged, whole: Path, tmp_path: Path, grid, capsys) -> None:
    config = tiny_data.load(tmp_path, *staged)
    found, course = read(config, *grid), Course(config)
    for step, (batch, length) in enumerate(SHAPES):
        assert [len(row) for row in found[step]] == [length] * batch
        capsys.readouterr()
        assert main(["data", "--run", str(whole), "--step", str(step + 1), "--json"]) == 0
        rows: list[list[int]] = [[] for _ in range(batch)]
        streams = {s.name: s.windows.stream for s in open_data(config).mixture.sources}
        for piece in json.loads(capsys.readouterr().out):
            dataset = streams[piece["source"]].dataset
            first = dataset.bounds(piece["document"])[0] + piece["offset"]
            rows[piece["sample"] - course.samples(step)] += dataset.read(first, first + piece["tokens"]).tolist()
        assert rows == found[step], f"step {step + 1}"


def test_rows(whole: Path) -> None:
    rows = read_rows(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert np.diff([0, *(row["samples"] for row in rows)]).tolist() == [batch for batch, _ in SHAPES]
    assert np.diff([0, *(row["tokens"] for row in rows)]).tolist() == [batch * length for batch, length in SHAPES]
    epochs = np.array([list(row["epochs"].values()) for row in rows])
    assert (np.diff(epochs, axis=0) >= 0).all() and (epochs[-1] > 0).all()
    peaks = [max(row["lr"] for row in rows[first : first + 2]) for first in (0, 2, 4)]
    assert peaks[1] < 1.01e-3 and peaks[2] == 2e-3, "its peak; constant"


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=FULL) for step in (1, 2, 3, 5, 7))])
def test_a_restart_anywhere_is_bitwise(tiny_data: TinyData, staged, whole: Path, tmp_path: Path, step: int) -> None:
    again = Path(shutil.copytree(whole, tmp_path / "run"))
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    assert launch(tiny_data.load(again, *staged, "checkpoint.resume=auto"), "small", 1) == 0
    rows = [[repeating(row) for row in read_rows(folder / "metrics.jsonl")] for folder in (whole, again)]
    assert rows[0] == rows[1] and len(rows[0]) == STEPS
    shards = [(folder / f"checkpoints/step_{STEPS:08d}/shard_00000.safetensors") for folder in (whole, again)]
    assert shards[0].read_bytes() == shards[1].read_bytes()


@pytest.mark.parametrize("grid", GRIDS, ids=" ".join)
@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.full) for step in (0, 1, 5, 7))])
def test_another_grid(tiny_data: TinyData, staged, whole: Path, tmp_path: Path, grid, step: int) -> None:
    """From the first step, or from the middle of a stage."""
    again = Path(shutil.copytree(whole, tmp_path / "run"))
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    line = ("train.py", "--config", tiny_data.config, *staged, f"run.dir={again}", "checkpoint.resume=auto", *grid)
    done = command(*line)
    assert (done.returncode, done.stderr) == (0, "")
    rows, expected = (read_rows(folder / "metrics.jsonl") for folder in (again, whole))
    for key in ("samples", "tokens", "epochs", "lr"):
        assert [row[key] for row in rows] == [row[key] for row in expected]
    assert difference([row["loss"] for row in rows], [row["loss"] for row in expected]) <= LOSS_FP32


@pytest.mark.full
def test_a_damaged_step_leads_back_into_an_earlier_stage(
    tiny_data: TinyData, staged, whole: Path, tmp_path: Path, capsys
) -> None:
    again = Path(shutil.copytree(whole, tmp_path / "run"))
    for later in (4, 6, 7, 8):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    shard = again / "checkpoints/step_00000005/shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:5000])
    assert launch(tiny_data.load(again, *staged, "checkpoint.resume=auto"), "small", 1) == 0
    assert "going on from an older step" in capsys.readouterr().err
    rows = [[repeating(row) for row in read_rows(folder / "metrics.jsonl")] for folder in (whole, again)]
    assert rows[0] == rows[1] and len(rows[0]) == STEPS


def test_what_is_said(tiny_data: TinyData, staged, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    assert launch(tiny_data.load(folder, *staged, "checkpoint.every=null", "observe.every=100"), "small", 1) == 0
    out = capsys.readouterr().out
    assert "8 steps of 128, then 256, then 512 tokens on cpu" in out
    says = [line for line in out.splitlines() if line.startswith(("step 3 of 8: ", "step 5 of 8: ", "step 7 of 8: "))]
    begun = [line.split(": ", 2)[1] for line in says if line.count(": ") > 1]
    assert begun == ["stages[1]", "stages[2]", "after the last stage"], out
    assert "batch.global 4 -> 8" in says[0] and "model.seq_len 32 -> 64" in says[1]
    assert says[2].endswith(": schedule.decay constant -> cosine, data.mask_eod true -> false")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        f"step_{step:08d}" for step in (2, 4, 6, 8)
    ], "each part ends with a saved step"
    line = ["data", "--run", str(folder), "--step", "5", "--json"]
    assert main(line) == 0
    assert {piece["source"] for piece in json.loads(capsys.readouterr().out)}


@pytest.mark.full
def test_a_part_gives_its_memory_back(tiny_data: TinyData, staged, tmp_path: Path, monkeypatch, capsys) -> None:
    """Before the next one is built; the ledger knows it, so what is held stays near the plan."""
    held: list[weakref.ref] = []

    def build(*arguments: Any, **options: Any) -> Any:
        assert [each() for each in held] == [None] * len(held), "what was built is gone"
        ready = build_trainer(*arguments, **options)
        held.append(weakref.ref(ready.trainer.engine))
        return ready

    monkeypatch.setattr(parts, "build_trainer", build)
    finished: list[int] = []  # how many parts were built before
    honest = Gather.finish
    monkeypatch.setattr(Gather, "finish", lambda gather: (finished.append(len(held)), honest(gather)))
    assert launch(tiny_data.load(tmp_path / "run", *staged), "small", 1) == 0
    assert len(held) == 4 and finished == [1, 2, 2, 3, 3, 4], (
        "by loading, and at the end of a part that another follows"
    )
    said = re.findall(r"memory of rank 0: ([\d.]+) MB, planned ([\d.]+) MB", capsys.readouterr().out)
    assert len(said) == 4 and all(abs(float(there) - float(planned)) < 1 for there, planned in said), said


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("stages=[{until_step: 2, batch: {global: 6}}]", "MZ-106 --nproc 4 in stages[0]: expected batch.global % "),
        ("stages=[{until_step: 2, model: {seq_len: 60000}}]", "MZ-207 "),
    ],
)
def test_a_stage_is_checked_before_anything_starts(
    tiny_data: TinyData, tmp_path: Path, override: str, line: str, capsys
) -> None:
    options = [*LINE, override, f"run.dir={tmp_path / 'run'}"]
    ranks = ["--nproc", "4"] if "106" in line else []
    assert main(["train", "--config", str(tiny_data.config), *options, *ranks]) != 0
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1, err
    assert not (tmp_path / "run/metrics.jsonl").exists()
