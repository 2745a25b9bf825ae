"""An overflow costs exactly one step: nothing that outlives it carries it on.

Steps after one with an infinite gradient are, bit for bit, those after a step without a valid token, which is skipped
too. Losses are scaled in fp32 too here, where a power of two changes no bit: the scale doubles in each good step of the
one run, and stays in the other. In fp16 it stays in both.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.builders.assemble import StageInputs
from megazero.comm.grid import Grid
from megazero.optim.loss_scale import GROWTH_INTERVAL, INITIAL
from megazero.plan.job import Job
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, job_on
from tests.ranks import run_ranks

FP32, FP16 = Precision(), Precision(torch.float16, torch.float32)
STEPS = 4
Rows = list[tuple[float, float]]


class Overflowing(Rank):
    """A rank that can have a step skipped in one of two ways."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.engine.loss_scale.dynamic = True
        self.engine.loss_scale.scale.fill_(INITIAL)
        self.empty: int | None = None

    def feed(self, step: int, m: int) -> StageInputs:
        given = super().feed(step, m)
        return replace(given, valid_SB=torch.zeros_like(given.valid_SB)) if step == self.empty else given

    def overflow(self, step: int, at: tuple[int, int]) -> Any:
        """Do a step with an infinite gradient on one data rank, in one micro-batch."""
        number, (bad, bad_m) = self.pipeline.num_stages - 1, at
        stage = self.pipeline.stages.get(number)
        if stage is None or self.data.rank != bad:
            return self.step(step)
        honest, ids = stage.run, self.feed(step, bad_m).now.sample_ids_B

        def run(x: Tensor | None, feed: StageInputs) -> Tensor:
            losses = honest(x, feed)
            if torch.equal(feed.now.sample_ids_B, ids):
                losses.register_hook(lambda gradient: gradient * torch.inf)
            return losses

        stage.run = run
        done = self.step(step)
        stage.run = honest
        return done


def left(rank: Rank) -> dict[str, Tensor]:
    """What a run would save."""
    rank.engine.flush_delayed()
    found = rank.weights()
    for unit in rank.engine.units:
        for name, values in rank.engine.optimizer.runs(unit)[0].state.items():
            found |= {} if values.is_meta else {f"{unit.name} {name}": values.clone()}
        found |= {f"{unit.name} {n}": piece.step.clone() for n, piece in enumerate(rank.engine.optimizer.pieces(unit))}
    return found


def trained(
    grid: Grid, job: Job, precision: Precision, bad: tuple[int, ...], at: tuple[int, int], *, empty: bool
) -> tuple[Rows, list[bool], dict[str, Tensor]]:
    """Train steps of which some are skipped: because they are empty, or by an overflow.

    Returns:
        Loss and norm of the others; which were skipped; what is left.
    """
    rank = Overflowing(grid, job, SHAPES["deep" if job.pipeline > 1 else "gpt"], precision)
    scale, rows, skipped = rank.engine.loss_scale, [], []
    for step in range(STEPS):
        rank.empty = step if empty and step in bad else None
        scale.good.fill_(GROWTH_INTERVAL - 1 if precision == FP32 and not empty else 0)
        done = rank.overflow(step, at) if step in bad and not empty else rank.step(step)
        skipped.append(bool(done.skipped))
        if step in bad and not empty:
            assert scale.scale == done.loss_scale / 2 and not done.finite
        if precision == FP16:
            scale.scale.fill_(INITIAL)
        if not done.skipped:
            rows.append((done.loss.item(), done.grad_norm.item()))
    return rows, skipped, left(rank)


def compared(grid: Grid, *arguments: Any) -> tuple[bool, list[bool], Rows, Rows]:
    """Whether two runs leave the same, and what they were."""
    (found, skipped, mine), (expected, also, theirs) = (trained(grid, *arguments, empty=e) for e in (False, True))
    assert skipped == also, f"{skipped} {also}"
    different = [name for name, value in mine.items() if not torch.equal(value, theirs[name])]
    assert not different, different
    return found == expected, skipped, found, expected


def check(job: Job, precision: Precision, bad: tuple[int, ...], at: tuple[int, int]) -> None:
    axes = {"tensor": job.tensor, "pipeline": job.pipeline, "shard": job.neighbours}
    for same, skipped, found, expected in run_ranks(job.ranks, compared, job, precision, bad, at, **axes):
        assert skipped == [step in bad for step in range(STEPS)], "one overflow costs one step"
        assert same, f"{found} {expected}"


QUICK = [
    job_on(1, 2, stage=1, quantize_gradients="int8"),
    job_on(1, 2, accumulation=2, stage=2, quantize_gradients="int4", error_feedback=True),
    job_on(1, 2, stage=1, quantize_gradients="int8", error_feedback=True),
    job_on(
        1, 4, stage=3, quantize_gradients="int8", quantize_parameters="int8", error_feedback=True, secondary_ranks=2
    ),
    job_on(1, 4, accumulation=2, stage=1, shard_ranks=2),
    job_on(1, 2, stage=2, offload_optimizer="cpu", delayed=True),
    job_on(2, 1, sequence=True, accumulation=2, stage=0, pipeline=2),
]


@pytest.mark.parametrize("job", QUICK, ids=str)
def test_an_overflow_costs_one_step(job: Job) -> None:
    check(job, FP32, (1,), (job.data - 1, job.micro_batches - 1))


def layouts() -> list[Job]:
    """Each stage with what it may have, and where its state may rest."""
    host, disk = {"offload_optimizer": "cpu"}, {"offload_optimizer": "nvme"}
    found = []
    for stage, accumulation in product(range(4), (1, 2)):
        two = job_on(1, 2, accumulation=accumulation, stage=stage)
        found += [two, replace(two, **host), replace(two, **host, delayed=True), replace(two, **disk)]
        found += [job_on(2, 2, True, accumulation, stage), job_on(1, 4, False, accumulation, stage, shard_ranks=2)]
        found += [job_on(1, 2, False, accumulation, stage, pipeline=2)]
        if stage == 0:
            continue
        for codes, feedback in product(("int8", "int4"), (False, True)):
            sent = {"quantize_gradients": codes, "error_feedback": feedback}
            found += [replace(two, **sent), replace(two, **sent, **host)]
            if stage == 3:
                hops = job_on(1, 4, False, accumulation, stage, secondary_ranks=2)
                found += [replace(hops, **sent, quantize_parameters="int8"), replace(hops, **sent)]
    found.append(job_on(1, 2, False, 2, 3, offload_parameters="cpu", offload_optimizer="cpu"))
    found += [job_on(1, 1, False, 4, 1, pipeline=2, schedule=each) for each in ("gpipe", "zb-h1")]
    return found


@pytest.mark.full
@pytest.mark.parametrize("precision", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("job", layouts(), ids=lambda job: f"{job} of {job.micro_batches}")
def test_overflows_cost_a_step_each(job: Job, precision: Precision) -> None:
    """The first one, the last one, two that follow each other; on each data rank and in each micro-batch in turn."""
    places = list(product(range(job.data), range(job.micro_batches)))
    for number, bad in enumerate([(0,), (STEPS - 1,), (1, 2)]):
        check(job, precision, bad, places[number % len(places)])
