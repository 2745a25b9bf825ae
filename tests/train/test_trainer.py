"""The loop: accumulation changes nothing, a bad step changes nothing, and what is counted, shown and due is exact."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.builders.assemble import StageInputs
from megazero.checkpoint.store import Store
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.observe.jsonl import read_rows
from megazero.optim.learning_rate import LearningRate
from megazero.tools.certify.tolerances import (
    GRADIENT_FP32,
    GRADIENT_FP64,
    LOSS_FP32,
    LOSS_FP64,
    WEIGHTS_FP64,
    difference,
)
from megazero.train.schedule import TrainSchedule
from megazero.train.trainer import Trainer
from megazero.train.validation import Evaluation
from tests.tiny_run import TinyData, built, train

Run = Callable[[Tensor | None, StageInputs], Tensor]


def state(trainer: Trainer) -> list[Tensor]:
    """Bits of every parameter, moment and step count (bits: nan equals itself)."""
    engine = trainer.engine
    tensors = [unit.resting.parameters.values for unit in engine.units] + [unit.masters for unit in engine.units]
    for unit in engine.units:
        tensors += [
            *engine.optimizer.runs(unit)[0].state.values(),
            *(piece.step for piece in engine.optimizer.pieces(unit)),
        ]
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return [tensor.view(bits[tensor.element_size()]).clone() for tensor in tensors]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def updates(trainer: Trainer) -> int:
    """Adam's own count, equal everywhere."""
    engine = trainer.engine
    (count,) = {float(piece.step) for unit in engine.units for piece in engine.optimizer.pieces(unit)}
    return int(count)


@pytest.mark.parametrize(
    ("dtype", "extra"),
    [
        pytest.param(dtype, extra, id=f"{dtype}-{name}", marks=pytest.mark.full if dtype == "fp32" and extra else ())
        for dtype in ("fp32", "fp64")
        for name, extra in {"plain": (), "eod": ("data.mask_eod=true",), "dropout": ("model.dropout=0.1",)}.items()
    ],
)
def test_micro_batches_change_nothing(tiny_data: TinyData, tmp_path: Path, dtype: str, extra: tuple[str, ...]):
    loss, gradient = (LOSS_FP64, GRADIENT_FP64) if dtype == "fp64" else (LOSS_FP32, GRADIENT_FP32)

    def run(micro: int):
        options = (f"batch.micro={micro}", f"precision.dtype={dtype}", "optimizer.lr=1e-3", *extra)
        return train(tiny_data.load(tmp_path / str(micro), *options))

    whole, *parts = run(4), run(2), run(1)
    for part in parts:
        assert difference(part.column("loss"), whole.column("loss")) <= loss
        assert difference(part.column("grad_norm")[:1], whole.column("grad_norm")[:1]) <= gradient
        if dtype == "fp64":
            assert difference(part.column("grad_norm"), whole.column("grad_norm")) <= gradient
            for name, tensor in whole.weights().items():
                assert difference(part.weights()[name], tensor) <= WEIGHTS_FP64, name


def test_tokens_of_the_masked_comparison_are_uneven(tiny_data: TinyData, tmp_path: Path):
    """What makes the comparison above hard: micro-batches of different weight in the mean."""
    trainer, _ = built(tiny_data.load(tmp_path, "data.mask_eod=true", "batch.micro=1"))
    counts = [int(batch.valid_SB.sum()) for batch in trainer.loader.step(0)]
    trainer.close()
    assert len(counts) == 4 and len(set(counts)) > 1


def _nan_weight(trainer: Trainer, run: Run, x: Tensor | None, feed: StageInputs) -> Tensor:
    trainer.engine.units[2].resting.parameters.values[7] = torch.nan
    return run(x, feed)


def _infinite_loss(trainer: Trainer, run: Run, x: Tensor | None, feed: StageInputs) -> Tensor:
    return run(x, feed) * torch.inf


def _nan_gradient(trainer: Trainer, run: Run, x: Tensor | None, feed: StageInputs) -> Tensor:
    found = run(x, feed)
    found.register_hook(lambda gradient: gradient * torch.nan)
    return found


@pytest.mark.parametrize("poison", [_nan_weight, _infinite_loss, _nan_gradient])
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_step_that_is_not_finite_changes_nothing(tiny_data: TinyData, tmp_path: Path, poison, every: int, dtype: str):
    options = (f"observe.every={every}", "batch.micro=4", f"precision.dtype={dtype}", "run.steps=6", "data.valid=null")
    trainer, folder = built(tiny_data.load(tmp_path, *options))
    stage = trainer.pipeline.stages[0]
    honest, before = stage.run, []

    def run(x: Tensor | None, feed: StageInputs) -> Tensor:
        if feed.now.step != 2:
            return honest(x, feed)
        found = poison(trainer, honest, x, feed)
        before[:] = state(trainer)
        return found

    stage.run = run
    with pytest.raises(UserError, match=r"^MZ-301 rank=0 step=3: .*this step did not update") as caught:
        trainer.run()
    trainer.close()
    assert before and same(state(trainer), before) and updates(trainer) == 2
    first = "gradient of head.norm.weight" if poison is _nan_gradient else "loss of micro-batch 0"
    assert f"first not finite: {first};" in str(caught.value) and caught.value.exit_code == 1
    rows = read_rows(folder.metrics) if folder.metrics.exists() else []
    assert [row["step"] for row in rows] == ([1, 2] if every == 1 else [])


@pytest.mark.parametrize(
    "name", ["embedding.tokens.weight", "embedding.positions.weight", "blocks.1.mlp.up_bias", "head.norm.bias"]
)
def test_bad_gradient_is_named_by_its_parameter(tiny_data: TinyData, tmp_path: Path, monkeypatch, name: str):
    trainer, _ = built(tiny_data.load(tmp_path))
    unit = next(unit for unit in trainer.engine.units if name in unit.gradients.views)
    close = unit.gradients.close

    def flip_one_element() -> None:
        close()
        unit.gradients.views[name].view.view(-1)[-1] = torch.inf

    monkeypatch.setattr(unit.gradients, "close", flip_one_element)
    before = state(trainer)
    what = rf"step=1: loss 5\.\d+, gradient norm inf; first not finite: gradient of {name};"
    with pytest.raises(UserError, match=what):
        trainer.run()
    trainer.close()
    assert same(state(trainer), before)


def test_a_fault_that_does_not_come_again_is_said_to_be_the_machines(tiny_data: TinyData, tmp_path: Path):
    trainer, _ = built(tiny_data.load(tmp_path))
    stage = trainer.pipeline.stages[0]
    honest, calls = stage.run, []

    def once(x: Tensor | None, feed: StageInputs) -> Tensor:
        calls.append(feed)
        return honest(x, feed) * (torch.nan if len(calls) == 3 else 1.0)

    stage.run = once
    what = r"MZ-301 rank=0 step=2: .*; first not finite: reduced gradient of embedding.tokens.weight; computed again, "
    with pytest.raises(UserError, match=what + "all finite: a hardware fault or an overflow.; this"):
        trainer.run()
    trainer.close()
    assert updates(trainer) == 1


def test_step_without_a_valid_token_is_skipped(tiny_data: TinyData, tmp_path: Path):
    """16 windows of 32 tokens, 8 of them made of documents of one token: with mask_eod nothing in them is scored."""
    with IndexedDatasetWriter(tmp_path / "set", np.uint16) as writer:
        for document in [range(i, i + 64) for i in range(4)] + [[i] for i in range(257)]:
            writer.append(np.array(document))
            writer.end_document()
    options = (f"data.train={tmp_path / 'set'}", "data.valid=null", "data.mask_eod=true", "batch.global=1")
    options += ("batch.micro=1", "run.steps=16", "schedule.warmup=4")
    trainer, folder = built(tiny_data.load(tmp_path / "run", *options))
    stage = trainer.pipeline.stages[0]
    honest, states, valid = stage.run, [], []

    def run(x: Tensor | None, feed: StageInputs) -> Tensor:
        states.append(state(trainer))
        valid.append(int(feed.valid_SB.sum()))
        return honest(x, feed)

    stage.run = run
    trainer.run()
    trainer.close()
    states.append(state(trainer))
    rows = read_rows(folder.metrics)
    empty = [count == 0 for count in valid]
    assert sum(empty) == 8 and empty != sorted(empty), "skipped steps lie between others"
    assert [same(a, b) for a, b in pairwise(states)] == empty
    assert [row["skipped"] for row in rows] == np.cumsum(empty).tolist()
    assert [row["loss"] is None for row in rows] == empty
    assert [row["tokens"] for row in rows] == [32 * (step + 1) for step in range(16)]
    rate = LearningRate(2e-3, 2e-4, 4, 16, "cosine")
    assert [row["lr"] for row in rows] == [rate.at(int(n)) for n in np.cumsum([0, *(not e for e in empty)])[:-1]]
    assert updates(trainer) == 8


def test_validation_and_rows_come_when_due(tiny_data: TinyData, tmp_path: Path):
    outcome = train(tiny_data.load(tmp_path, "run.steps=7", "observe.every=3", "data.valid_every=2"))
    assert [(row["step"], "valid_loss" in row) for row in outcome.rows] == [
        (2, True),
        (3, False),
        (4, True),
        (6, True),
        (7, True),
    ]
    assert outcome.rows[-1]["valid_loss"] == outcome.trainer.scores["valid_loss"]


class Broken(Evaluation):
    every = None

    def score(self, done: int, stop: Callable[[], bool]) -> None:
        raise RuntimeError("the validation data went away")


def test_due_steps():
    pace = TrainSchedule(7, LearningRate(1.0, 0.0, 0, 7, "cosine"), log_every=3, last=7)
    assert [step for step in range(1, 8) if pace.logs(step)] == [3, 6, 7]
    ends, often = Broken(), Broken()
    often.every = 3
    assert [step for step in range(1, 8) if ends.due(step, 7)] == [7]
    assert [step for step in range(1, 8) if often.due(step, 7)] == [3, 6, 7]


def test_observing_changes_nothing(tiny_data: TinyData, tmp_path: Path):
    quiet = train(tiny_data.load(tmp_path / "a", "observe.every=100", "data.valid=0.1", "run.steps=5"))
    busy = train(tiny_data.load(tmp_path / "b", "observe.every=1", "data.valid_every=1", "run.steps=5"))
    assert quiet.rows[-1]["loss"] == busy.rows[-1]["loss"]
    assert same(state(quiet.trainer), state(busy.trainer))


def test_weights_are_saved_before_the_last_validation_can_fail(tiny_data: TinyData, tmp_path: Path):
    trainer, folder = built(tiny_data.load(tmp_path / "run"))

    trainer.evaluations = [Broken()]
    try:
        with pytest.raises(RuntimeError, match="went away"):
            trainer.run()
    finally:
        trainer.close()
    assert Store(folder.checkpoints).steps() == [4]


def test_weights_that_the_last_update_left_not_finite_are_not_saved(tiny_data: TinyData, tmp_path: Path):
    options = ("run.steps=1", "optimizer.lr=1e38", "schedule.warmup=0", "schedule.decay=constant", "data.valid=null")
    trainer, folder = built(tiny_data.load(tmp_path / "run", *options, "optimizer.weight_decay=10"))
    try:
        with pytest.raises(UserError, match=r"MZ-302 step=1 .*not finite after the last update"):
            trainer.run()
    finally:
        trainer.close()
    assert not list(folder.checkpoints.iterdir())
