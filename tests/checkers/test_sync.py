"""No training step makes the host wait for the device but in named places; and who plants a wait is found out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.builders import assemble
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.data.batch import MicroBatch
from megazero.model.batch_context import BatchContext
from megazero.plan.job import Job
from megazero.train.trainer import Trainer
from megazero.zero import engine
from megazero.zero.engine import Engine
from megazero.zero.placement import Precision
from tests.checkers.sync import SyncDetector, Wait
from tests.layouts import SHAPES, Rank, job_on
from tests.ranks import run_ranks
from tests.tiny_run import TinyData, built

FP32, BF16, FP16 = Precision(), Precision(torch.bfloat16), Precision(torch.float16)


def waits_of_a_run(tiny_data: TinyData, folder: Path, *options: str) -> list[Wait]:
    """Train three steps as a run does; return what waits in the trainer's steps."""
    options = ("run.steps=3", "data.valid=null", "observe.every=10", *options)
    trainer, _ = built(tiny_data.load(folder, *options))
    detector, honest = SyncDetector(), trainer.train_step

    def watched(step: int) -> None:
        with detector:
            honest(step)

    trainer.train_step = watched  # type: ignore[method-assign]
    try:
        trainer.run()
    finally:
        trainer.close()
    return detector.found


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("data.mask_eod=true", "model.dropout=0.1", "batch.micro=1"),
        ("precision.dtype=fp16", "memory.recompute=full"),
        ("precision.dtype=bf16", "memory.recompute=selective", "model.position=rotary", "optimizer.clip=0"),
        ("precision.dtype=fp64", "checkpoint.every=1", "checkpoint.async=true"),
    ],
    ids=" ".join,
)
def test_a_step_of_a_run_waits_nowhere(tiny_data: TinyData, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert waits_of_a_run(tiny_data, tmp_path / "run", *options) == []


def waits_of_a_rank(grid: Grid, layout: Job, precision: Precision) -> list[Wait]:
    """What waits in the second of two steps of a rank, beside a host that is apart."""
    detector = SyncDetector()
    with detector.watch_hosts():
        rank = Rank(grid, layout, SHAPES["deep"], precision)
        rank.step(0)
        feeds = [rank.feed(1, m) for m in range(layout.micro_batches)]
        with detector:
            rank.engine.begin_step()
            rank.pipeline.train(feeds, lambda feed: feed)
            rank.engine.finish_step(1e-3, votes=[2])
    rank.engine.flush_delayed()
    return detector.found


OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
LAYOUTS = {
    "alone": job_on(),
    "stage 1": job_on(1, 2, False, 2, 1),
    "stage 2, bf16": job_on(1, 2, False, 2, 2),
    "stage 3": job_on(1, 2, False, 2, 3),
    "tensor": job_on(2, 1, False, 2),
    "sequence": job_on(2, 1, True, 2),
    "1f1b": job_on(1, 1, False, 4, 1, pipeline=2),
    "zb-h1, stage 2": job_on(1, 1, False, 4, 2, pipeline=2, schedule="zb-h1"),
    "interleaved": job_on(1, 1, False, 2, 1, pipeline=2, schedule="interleaved", chunks=2),
    "offload": job_on(1, 2, False, 2, 3, **OFFLOADED),
    "delayed": job_on(1, 2, False, 1, 1, offload_optimizer="cpu", delayed=True),
    "Pa+cpu": job_on(2, 1, False, 2, 1, recompute="full", partition=True, offload="cpu"),
    "hybrid": job_on(2, 2, True, 1, 3, shard_ranks=1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_any_layout_waits_nowhere(name: str) -> None:
    layout = LAYOUTS[name]
    axes: dict[str, Any] = {"tensor": layout.tensor, "pipeline": layout.pipeline, "shard": layout.neighbours}
    precision = BF16 if "bf16" in name else FP32
    for found in run_ranks(layout.ranks, waits_of_a_rank, layout, precision, **axes):
        assert found == []


def read_at_once(trainer: Trainer) -> None:
    """What the trainer once did: it waited for all that was queued."""
    if trainer._pending is not None and trainer._numbers is None:
        result = trainer._pending.result
        _ = bool(result.finite.item()), bool(result.skipped.item())


def plant_flags(patch: pytest.MonkeyPatch) -> None:
    honest = Trainer._read

    def read(trainer: Trainer) -> None:
        read_at_once(trainer)
        honest(trainer)

    patch.setattr(Trainer, "_read", read)


def plant_feed(patch: pytest.MonkeyPatch) -> None:
    """What the feed once did: a copy of each tensor of each micro-batch."""

    def feeds_of(tensor: Any, device: torch.device, sequence: bool) -> Callable[..., assemble.StageInputs]:
        def feed(batch: MicroBatch, step: int, training: bool) -> assemble.StageInputs:
            tokens, targets, valid = (x.to(device) for x in (batch.tokens_SB, batch.targets_SB, batch.valid_SB))
            return assemble.StageInputs(tokens, targets, valid, BatchContext(step, batch.sample_ids_B.to(device)))

        return feed

    patch.setattr("megazero.run.build.feeds_of", feeds_of)


def plant_votes(patch: pytest.MonkeyPatch) -> None:
    """What the loop once did: an agreement of its own behind the update, made on the host and read with `tolist`."""
    honest = Trainer.train_step

    def train_step(trainer: Trainer, step: int) -> None:
        honest(trainer, step)
        trainer.stopping.check()

    patch.setattr(Trainer, "train_step", train_step)


def plant_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "clip_factor", lambda norm, limit: limit / norm if norm > limit else torch.ones_like(norm))


def plant_mask(patch: pytest.MonkeyPatch) -> None:
    honest = Engine.loss

    def loss(self: Engine, losses_SB: Tensor, valid_SB: Tensor) -> Tensor:
        losses_SB[valid_SB].sum()
        return honest(self, losses_SB, valid_SB)

    patch.setattr(Engine, "loss", loss)


def plant_copy(patch: pytest.MonkeyPatch) -> None:
    honest = Engine.finish_step

    def finish_step(self: Engine, lr: float, votes: Any = (), **how: Any) -> engine.StepResult:
        result = honest(self, lr, votes, **how)
        result.grad_norm.cpu()
        return result

    patch.setattr(Engine, "finish_step", finish_step)


def plant_number(patch: pytest.MonkeyPatch) -> None:
    honest = Engine.begin_step

    def begin_step(self: Engine) -> None:
        honest(self)
        self._totals.add_(torch.tensor([0.0], device=self._totals.device))

    patch.setattr(Engine, "begin_step", begin_step)


def plant_one(patch: pytest.MonkeyPatch) -> None:
    """An element set to a number: torch makes a tensor of it on the host, and copies that."""
    honest = Engine.begin_step

    def begin_step(self: Engine) -> None:
        honest(self)
        self._totals[0] = 0.0

    patch.setattr(Engine, "begin_step", begin_step)


def plant_list(patch: pytest.MonkeyPatch) -> None:
    honest = Engine.begin_step

    def begin_step(self: Engine) -> None:
        honest(self)
        self._totals[[0, 1]].sum()

    patch.setattr(Engine, "begin_step", begin_step)


def plant_documents(patch: pytest.MonkeyPatch) -> None:
    honest = BatchContext.positions_S

    def positions_S(self: BatchContext, length: int) -> Tensor:
        int(self.sample_ids_B.max())
        return honest(self, length)

    patch.setattr(BatchContext, "positions_S", positions_S)


@pytest.mark.parametrize(
    ("plant", "operation", "function"),
    [
        (plant_flags, ".item()", "read_at_once"),
        (plant_feed, ".to(device)", "<genexpr>"),
        (plant_votes, ".tolist()", "check"),
        (plant_clip, ".__bool__()", "<lambda>"),
        (plant_mask, "aten::index by a mask", "loss"),
        (plant_copy, ".cpu()", "finish_step"),
        (plant_number, "torch.tensor()", "begin_step"),
        (plant_one, "aten::copy_ that blocks", "begin_step"),
        (plant_list, "aten::index by a list", "begin_step"),
        (plant_documents, ".__int__()", "positions_S"),
    ],
)
def test_a_planted_wait_is_found(
    tiny_data: TinyData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    operation: str,
    function: str,
) -> None:
    plant(monkeypatch)
    found = waits_of_a_run(tiny_data, tmp_path / "run")
    assert (operation, function) in [(wait.operation, wait.place.rpartition(":")[2]) for wait in found]


@pytest.mark.parametrize("way", ["send", "bring"])
def test_a_copy_of_the_host_that_blocks_is_found(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def copy(host: Host, x: Tensor, into: Tensor, purpose: str) -> None:
        into.copy_(x)

    monkeypatch.setattr(Host, way, copy)
    layout = job_on(1, 2, False, 2, 3, **OFFLOADED)
    for found in run_ranks(2, waits_of_a_rank, layout, FP32):
        assert [wait.operation for wait in found] == ["aten::copy_ that blocks"]
