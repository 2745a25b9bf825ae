"""Hybrid sharding: states are sharded over some data ranks and replicated over the others (`zero.shard_ranks`)."""

from dataclasses import replace

import pytest
import torch

from megazero.base.errors import UserError
from megazero.builders.pipeline import check_world
from megazero.comm.grid import Grid
from megazero.model.transformer import Shape
from megazero.plan.job import Job
from megazero.plan.layers import parameters
from megazero.plan.memory import memory
from megazero.plan.traffic import traffic
from megazero.zero.placement import Precision
from tests.layouts import (
    SHAPES,
    Rank,
    Trained,
    Wires,
    config_of,
    equal,
    ids,
    job_on,
    pairwise,
    planned,
    train,
    train_rank,
)
from tests.plan.test_memory import EXACT, FLAVOURS, held
from tests.ranks import run_ranks
from tests.test_layouts import DTYPES, compare
from tests.tools.test_dry_run import real, simulated

SCHEDULES = {1: ("1f1b", 1), 2: ("zb-h1", 1)}
OFFLOADS = {
    "here": {},
    "optimizer": {"offload_optimizer": "cpu"},
    "delayed": {"offload_optimizer": "cpu", "delayed": True},
    "both": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
}
CASES = [
    (flavour, dtype, grid, sequence, accumulation, stage, recompute, offload)
    for flavour in ("deep", "deep-untied")
    for dtype in DTYPES
    for grid in ((1, 4, 2, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 1, 2), (2, 4, 2, 1), (1, 4, 2, 2), (1, 8, 2, 1))
    for sequence in (False, True)
    if grid[0] > 1 or not sequence
    for accumulation in (1, 2)
    for stage in (1, 2, 3)
    for recompute in ("none", "full")
    for offload in OFFLOADS
    if stage == 3 or offload != "both"
]
COVER = pairwise(CASES)


def size_of(case: tuple) -> int:
    tensor, data, _, pipeline = case[2]
    return tensor * data * pipeline


FEW = [case for case in COVER if size_of(case) == 4][:5]


def layout_from(case: tuple) -> Job:
    _, _, (tensor, data, shard, pipeline), sequence, accumulation, stage, recompute, offload = case
    schedule, chunks = SCHEDULES[pipeline]
    layout = job_on(tensor, data, sequence, accumulation, stage, pipeline=pipeline, schedule=schedule, chunks=chunks)
    return replace(layout, shard_ranks=shard, recompute=recompute, **OFFLOADS[offload])


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FEW else pytest.mark.full) for c in COVER], ids=ids(COVER)
)
def test_equals_one_process(case: tuple) -> None:
    """Replicas are held to be equal bit for bit by `train`."""
    layout = layout_from(case)
    compare(train(layout, case[0], DTYPES[case[1]]), *case[:2], delayed=layout.delayed)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_group_of_all_ranks_is_plain_sharding(stage: int) -> None:
    plain = job_on(1, 4, False, 2, stage)
    equal(train(replace(plain, shard_ranks=4), "gpt", Precision()), train(plain, "gpt", Precision()))


def one_step(grid: Grid, layout: Job, flavour: str, precision: Precision) -> dict[str, dict[str, int]]:
    rank = Rank(grid, layout, SHAPES[flavour], precision)
    rank.step(0)
    counted = grid.comm.ledger.traffic_as_dict()
    return {axis: {purpose: row["bytes_sent"] for purpose, row in rows.items()} for axis, rows in counted.items()}


BYTES = [
    (shard, stage, accumulation, flavour, dtype, offload)
    for shard in (1, 2)
    for stage in (1, 2, 3)
    for accumulation in (1, 4)
    for flavour in ("deep", "deep-untied")
    for dtype in ("fp32", "bf16")
    for offload in ("here", "optimizer", "both")
    if stage == 3 or offload != "both"
]
BF16 = {"fp32": Precision(), "bf16": Precision(torch.bfloat16, torch.float32)}
SHORT = pairwise(BYTES)[:5]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in SHORT else pytest.mark.full) for c in BYTES], ids=ids(BYTES)
)
def test_traffic_and_memory_are_the_formulas(case: tuple) -> None:
    """To the byte; between the groups a rank sends its shard of the gradients once a step: 2 P / N x (R - 1) / R."""
    shard, stage, accumulation, flavour, dtype, offload = case
    layout = replace(job_on(1, 4, False, accumulation, stage, shard_ranks=shard), **OFFLOADS[offload])
    precision = BF16[dtype]
    plan = planned(layout, SHAPES[flavour], precision)
    ledgers = run_ranks(4, one_step, layout, flavour, precision, shard=shard)
    for rank, ledger in enumerate(ledgers):
        assert traffic(plan, 0, rank % shard) == ledger, f"rank {rank}"
    item, each = precision.gradients.itemsize, sum(ledgers[0]["replica"].values())
    whole = parameters(plan.shape)
    assert each == pytest.approx(2 * whole * item / shard * (1 - shard / 4), rel=0.02)
    shape = FLAVOURS["gpt"]
    size = planned(layout, shape, precision)
    for _, measured in run_ranks(4, held, layout, shape, precision, shard=shard):
        predicted = memory(size, 0, fused=False).held
        for category in (*EXACT, "host_optimizer", "host_gradients", "host_parameters", "pool"):
            assert predicted.get(category, 0) == measured.get(category, 0), category


@pytest.mark.parametrize(
    ("stage", "offload"), [(1, "optimizer"), (3, "here"), pytest.param(2, "here", marks=pytest.mark.full)]
)
def test_a_simulated_rank_counts_what_a_real_one_does(stage: int, offload: str) -> None:
    layout = replace(job_on(1, 4, False, 2, stage, shard_ranks=2), **OFFLOADS[offload])
    counts = run_ranks(4, real, layout, Wires(), "deep", "fp32", shard=2)
    for rank, counted in ((0, counts[0]), (3, counts[3])):  # of other groups, and other places in them
        assert simulated(rank, layout, Wires(), "deep", "fp32") == counted, f"rank {rank}"


def test_groups_that_do_not_divide_the_data_ranks_are_refused() -> None:
    config = config_of(job_on(1, 4, False, 1, 1, shard_ranks=2), SHAPES["gpt"], Precision())
    with pytest.raises(UserError, match=r"MZ-106: expected data ranks % zero.shard_ranks == 0, got 3 % 2 = 1"):
        check_world(config, 3)


def on_two_hosts(grid: Grid, job: Job, shape: Shape, precision: Precision) -> Trained:
    """Shard groups talk through shared memory, and to each other through sockets."""
    assert grid.comm.shared_memory is not None
    grid.comm.shared_memory.reached = frozenset(grid["shard"].ranks)
    return train_rank(grid, job, shape, precision)


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_on_two_hosts_do_not_wait_in_a_circle(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of many more pieces than there is room for: a rank that has one open may wait on no socket."""
    job = job_on(1, 4, False, 2, stage, shard_ranks=2)
    near = train(job, "gpt", Precision())
    monkeypatch.setattr("megazero.comm.transport.exchange.SLOT_BYTES", 1 << 11)
    equal(train(job, "gpt", Precision(), on_two_hosts), near)
