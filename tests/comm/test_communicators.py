"""The communicators that a plan counts are those that a rank makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megazero.comm import grid as grids
from megazero.comm.context import CommContext
from megazero.comm.grid import Grid, make_grid
from megazero.pipeline.transport import Transport
from megazero.plan.communicators import ARRIVAL, DEPARTURE, Communicator, communicators
from megazero.plan.job import Bytes, Job
from megazero.plan.machines import MACHINES
from megazero.plan.memory import batch, memory, planned
from megazero.plan.model import Shape
from tests.comm.standins import NotedGroup, Splits, all_connect
from tests.ranks import run_ranks

TIED = Shape(8, 64, 4, 4, 256, 128, 32)
UNTIED = replace(TIED, tie_embeddings=False)
SHAPES = {"tied": TIED, "untied": UNTIED}
AXES = ("tensor", "pipeline", "data", "shard_ranks")
GRIDS = [
    (1, 1, 4, None),
    (2, 1, 2, None),
    (8, 1, 1, None),
    (2, 2, 2, None),
    (1, 3, 2, None),
    (2, 4, 4, 2),
    (1, 4, 1, None),
]
JOBS = [
    Job(shape, Bytes(2, 4, 4), **dict(zip(AXES, grid, strict=True)), schedule=schedule, chunks=chunks, global_batch=16)
    for shape, grid, (schedule, chunks) in product(
        SHAPES.values(), GRIDS, (("1f1b", 1), ("interleaved", 2), ("zb-v", 2))
    )
    if grid[1] > 1 or schedule == "1f1b"
]


@contextmanager
def pretended(rank: int, world: int, uses: list) -> Iterator[dist.ProcessGroup]:
    """Be one rank of a world of NCCL."""
    group = NotedGroup(rank, (tuple(range(world)), -1), uses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda: rank)
        patch.setattr(dist, "get_world_size", lambda: world)
        patch.setattr(type(dist.group), "WORLD", property(lambda _: group))
        yield group


def made(job: Job, rank: int) -> Splits:
    """What one rank makes and uses before its first step."""
    splits = Splits(rank)
    comm = CommContext("nccl", split_group=splits)
    sizes = {"tensor": job.tensor, "pipeline": job.pipeline, "shard_ranks": job.shard_ranks}
    with pretended(rank, job.ranks, splits.uses):
        grid = make_grid(comm=comm, device_type="cpu", tied=job.ties_ranks, **sizes)
        Transport(grid["pipeline"], job.layers.rank_of, torch.float32, torch.device("cpu")).open()
    groups = [axis.group for axis in set(grid.values()) if axis.size > 1]
    assert all(isinstance(group, NotedGroup) for group in groups) and len(groups) == len(set(map(id, groups)))
    return splits


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_plan_s_are_those_that_are_made(job: Job) -> None:
    found = [made(job, rank) for rank in range(job.ranks)]
    across = job.tensor * job.data
    for rank, one in enumerate(found):
        counted = list(communicators(job, rank // across, 24))
        assert [len(ranks) for ranks, _ in one.own] == [each.ranks for each in counted if each.name != "world"], counted
        assert sum(each.name == "world" for each in counted) == 1
        used = {use for _, use in one.uses}
        assert used == {(tuple(range(job.ranks)), -1), *one.own}, "all are connected"
        few = [each.bytes == 4 * 3 * 12 * 2**20 or each.bytes <= 4 * ARRIVAL for each in counted]
        assert few.count(True) >= sum(" to stage " in each.name for each in counted)
    assert all(one.calls == found[0].calls for one in found), "every rank calls every split"
    assert all_connect([[use for _, use in one.uses] for one in found])


def test_ends_are_there_only_where_a_weight_is_tied_over_two_ranks() -> None:
    def names(shape: Shape, schedule: str, rank: int) -> list[str]:
        job = Job(shape, Bytes(2, 4, 4), pipeline=4, schedule=schedule, chunks=2 if schedule == "zb-v" else 1)
        return [one.name for one in communicators(job, rank, 24)]

    assert ["ends" in names(TIED, "1f1b", rank) for rank in range(4)] == [True, False, False, True]
    assert not any("ends" in names(shape, "1f1b", rank) for shape in (UNTIED,) for rank in range(4))
    assert not any("ends" in names(TIED, "zb-v", rank) for rank in range(4)), "one rank has both"


def test_their_memory() -> None:
    """24 rings and trees of two ranks: 24 x 2 x 12 MiB; a channel has 4 buffers, where its messages arrive."""
    job = Job(UNTIED, Bytes(2, 4, 4), pipeline=2, data=2)
    assert list(communicators(job, 1, 24)) == [
        Communicator("world", 4, 4 * 3 * (ARRIVAL + DEPARTURE)),
        Communicator("pipeline", 2, 4 * 2 * (ARRIVAL + DEPARTURE)),
        Communicator("data", 2, 24 * 2 * (ARRIVAL + DEPARTURE)),
        Communicator("activations to stage 1", 2, 4 * ARRIVAL),
        Communicator("gradients to stage 0", 2, 4 * DEPARTURE),
    ]
    assert not list(communicators(job, 1, 0)) and not list(communicators(Job(UNTIED, Bytes(2, 4, 4)), 0, 24))


def test_they_are_part_of_what_a_plan_holds() -> None:
    job, machine = Job(TIED, Bytes(2, 4, 4), data=2, global_batch=2), MACHINES["a100-80gb"]
    size = sum(one.bytes for one in communicators(job, 0, machine.nccl_channels))
    more = {"communicators": size, "batch": batch(job)}
    assert planned(job, 0, machine).held == memory(job, 0).held | more and size > 2**29
    assert planned(job, 0, replace(machine, nccl_channels=0)) == memory(job, 0), "as ledgers have it"


def few_of(grid: Grid) -> dict[str, bool]:
    """Which groups of a grid get few multiprocessors."""
    found, honest = {}, grids._group_of

    def noted(comm: CommContext, name: str, *given: Any, few_ctas: bool = False) -> Any:
        found[name] = few_ctas
        return honest(comm, name, *given, few_ctas=few_ctas)

    with patch.object(grids, "_group_of", noted):
        make_grid(tensor=2, pipeline=2, comm=grid.comm, device_type="cpu")
    return found


def test_messages_of_a_pipeline_get_few_multiprocessors() -> None:
    few = {"pipeline": True, "data": False, "tensor": False}
    assert run_ranks(8, few_of) == [few] * 8
