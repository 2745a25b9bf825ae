"""The squares behind the norm: one operation for all units and ranks, and the sums of before, bit for bit."""

from dataclasses import replace

import pytest
import torch

from megazero.comm.grid import Grid
from megazero.kernels.operations import REFERENCE
from megazero.plan.job import Job
from megazero.zero.placement import Precision
from megazero.zero.unit import Unit
from tests.layouts import SHAPES, Rank, job_on
from tests.ranks import run_ranks


def squares(grid: Grid, layout: Job) -> tuple[list[int], list[float], list[float]]:
    """The number of tensors in each call of the operation; the squares of a step, and of this rank's own parts."""
    rank, calls, own = Rank(grid, layout, SHAPES["gpt"], Precision()), [], []
    parts, first = 1 if layout.shards_optimizer else layout.data, grid["tensor"].rank == 0

    def counted(flats: list[torch.Tensor]) -> torch.Tensor:
        calls.append(len(flats))
        own.extend(by_parts(unit, parts, first=first) for unit in rank.engine.units)  # the update unscales them
        return REFERENCE.sums_of_squares(flats)

    rank.engine.ops = replace(REFERENCE, sums_of_squares=counted)
    return calls, rank.step(0).squares.tolist(), own


def by_parts(unit: Unit, parts: int, *, first: bool) -> float:
    """One call for each part, as a loop would have it."""
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(unit.gradients.reduced.chunk(parts)):
        begin = unit.shard.start + number * len(part)
        counted = part if first else part[: max(unit.layout.tp_replicated - begin, 0)]
        total = total + REFERENCE.sums_of_squares([counted])[0]
    return float(total)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("tensor", "data"), [(1, 4), (2, 2)])
def test_one_operation_sums_all_squares_of_a_step(tensor: int, data: int, stage: int) -> None:
    """In stage 0 every rank sums every rank's part; a rank that does not count what is whole cuts it off each part."""
    ranks = run_ranks(tensor * data, squares, job_on(tensor, data, tensor > 1, 1, stage), tensor=tensor)
    units = len(ranks[0][1])
    for number, (calls, found, _) in enumerate(ranks):
        pieces = (1 if stage else data) * (2 if number % tensor else 1)
        assert calls == [units * pieces]
        assert found == ranks[0][1]
    if stage == 0:  # of the ranks of the tensor axis, whose sums are added in order
        whole = [own for _, _, own in ranks[:tensor]]
        assert [sum(of_unit) for of_unit in zip(*whole, strict=True)] == ranks[0][1]
