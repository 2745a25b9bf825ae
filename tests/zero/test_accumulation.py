"""Gradients over the micro-batches of a step: the first delivery overwrites, later ones are added, in each stage.

Gradients are whole numbers, so that sums are exact in any order. The steps before have left other values, and values
that are not finite, wherever gradients rest or pass.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from megazero.comm.grid import Grid
from megazero.plan.job import Job
from megazero.zero.gradients import GradientAccumulator
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, job_on
from tests.ranks import run_ranks

STEPS = 3
Use = tuple[int, int, int, int]  # step, rank, micro-batch, use of a parameter in it


def drawn(shape: tuple[int, ...], number: int, use: Use) -> Tensor:
    """The gradient of one use of one parameter."""
    seed = 1 + number + 1000 * use[0] + 100_000 * use[1] + 1_000_000 * use[2] + 10_000_000 * use[3]
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def deliver(slot: GradientAccumulator, gradient: Tensor, way: int) -> None:
    """Deliver a gradient in one of the ways of layers."""
    if gradient.dim() < 2:
        slot.add_sum(torch.stack([gradient - 1, torch.ones_like(gradient)])) if way % 2 else slot.add(gradient)
    elif way % 3 == 0:
        slot.add_product(torch.eye(len(gradient)), gradient)
    elif way % 3 == 1:
        slot.add_rows(torch.arange(len(gradient)), gradient)
    else:
        slot.add(gradient)


def summed(grid: Grid, job: Job, *, deferred: bool) -> list[str]:
    """The parameters whose reduced gradients are not the sums of a step, over some steps."""
    rank = Rank(grid, job, SHAPES["gpt"], Precision())
    (stage,), wrong = rank.engine.stages, []
    ranks, micro_batches = range(rank.data.size), range(job.micro_batches)
    views = [(unit, name) for unit in stage.units for name in unit.gradients.views]
    shapes = {i.name: i.shape for unit in stage.units for i in unit.layout.intervals}
    for step in range(STEPS):
        rank.engine.begin_step()

        def backward(m: int, step: int) -> None:
            for use in (0, 1):
                for number, (unit, name) in reversed(list(enumerate(views))):
                    gradient = drawn(shapes[name], number, (step, rank.data.rank, m, use))
                    deliver(unit.gradients.views[name], gradient, number + use + m)

        for m in micro_batches:
            stage.forward(m)
            for unit, name in views:
                unit.gradients.views[name].expect()
                unit.gradients.views[name].expect()
            last = m == micro_batches[-1]
            sends, begin = job.stage >= 2 or last, partial(backward, m, step)
            _run(stage, m, begin, sends, last, deferred=deferred)
            if sends:
                stage.finish_reduction()
        for number, (unit, name) in enumerate(views):
            uses = product([step], ranks, micro_batches, (0, 1))
            expected = torch.stack([drawn(shapes[name], number, use) for use in uses]).sum(0)
            place = next(i for i in unit.layout.intervals if i.name == name)
            first, last = (min(max(at - unit.shard.start, 0), len(unit.masters)) for at in (place.start, place.stop))
            begin, end = (at + unit.shard.start - place.start for at in (first, last))
            if first < last and not torch.equal(unit.gradients.reduced[first:last], expected.view(-1)[begin:end]):
                wrong.append(f"step {step}: {name}")
        for unit in stage.units:
            unit.gradients.reduced.fill_(torch.nan)
            if unit.gradients.partial is not None:
                unit.gradients.partial.fill_(torch.inf)
    return wrong


def _run(stage, m: int, begin: Callable[[], None], sends: bool, last: bool, *, deferred: bool) -> None:
    if deferred:
        stage.backward_input(m, begin)
        stage.backward_weight(m, reduce=sends, last=last)
    else:
        stage.backward(m, begin, reduce=sends, last=last)


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2, 3])
def test_gradients_of_a_step_are_the_sums_of_its_micro_batches(stage: int, offload: bool, deferred: bool) -> None:
    job = job_on(1, 2, accumulation=4, stage=stage, offload_optimizer="cpu" if offload else "none")
    assert run_ranks(2, partial(summed, deferred=deferred), job) == [[], []]


@pytest.mark.parametrize("stage", [2, 3])
def test_with_one_shard_rank_they_are_accumulated_on_the_host(stage: int) -> None:
    job = job_on(1, 2, accumulation=4, stage=stage, shard_ranks=1, offload_optimizer="cpu")
    assert run_ranks(2, partial(summed, deferred=False), job, shard=1) == [[], []]
