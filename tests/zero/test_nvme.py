"""Optimizer state, gradients and shards on disks: the same bits, other places, and what is read and written."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megazero.comm.grid import Grid
from megazero.nvme.disk import Disk
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.traffic import traffic
from tests.layouts import SHAPES, Rank, equal, ids, pairwise, planned, train
from tests.ranks import run_ranks
from tests.zero.test_offload import DTYPES, layout_of

WHAT: dict[str, dict[str, bool]] = {
    "optimizer": {"offload_optimizer": "nvme"},
    "parameters": {"offload_parameters": "nvme"},
    "both": {"offload_optimizer": "nvme", "offload_parameters": "nvme"},
    "optimizer, parameters on the host": {"offload_optimizer": "nvme", "offload_parameters": "cpu"},
    "parameters, optimizer on the host": {"offload_parameters": "nvme", "offload_optimizer": "cpu"},
}
CASES = [
    (flavour, dtype, grid, accumulation, stage, what)
    for flavour in ("deep", "deep-untied")
    for dtype in DTYPES
    for grid in ("1", "dp2", "dp4 shard2", "tp2 sequence", "tp2 dp2 sequence", "pp2 dp2", "pp2 zb-v")
    for accumulation in (1, 4)
    for stage in (1, 2, 3)
    for what in WHAT
    if stage == 3 or what == "optimizer"
]
COVER = pairwise(CASES)
FEW = COVER[:6]  # the first of a cover hold most of its pairs


def laid_out(grid: str, accumulation: int, stage: int) -> Job:
    words = grid.split()
    layout = layout_of(" ".join(word for word in words if not word.startswith("shard")), accumulation, stage)
    return replace(layout, shard_ranks=2) if "shard2" in words else layout


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FEW else pytest.mark.full) for c in COVER], ids=ids(COVER)
)
def test_it_changes_no_bit(case: tuple[str, str, str, int, int, str]) -> None:
    flavour, dtype, grid, accumulation, stage, what = case
    layout = laid_out(grid, accumulation, stage)
    found = train(replace(layout, **WHAT[what]), flavour, DTYPES[dtype])
    # What an update reads of a disk it leaves alone: in memory torch's kernel unscales and clips gradients in place.
    plain = train(layout, flavour, DTYPES[dtype])
    equal(replace(found, gradients={}), replace(plain, gradients={}))


def counted(grid: Grid, layout: Job, precision: Any) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return the bytes held by category, and those that the second step sends by axis and purpose."""
    rank, ledger = Rank(grid, layout, SHAPES["deep"], precision), grid.comm.ledger
    rank.step(0)
    before = {(a, p): sent.bytes_sent for a, purposes in ledger.traffic.items() for p, sent in purposes.items()}
    rank.step(1)
    sent: dict[str, dict[str, int]] = {}
    for axis, purposes in ledger.traffic.items():
        for purpose, now in purposes.items():
            if more := now.bytes_sent - before.get((axis, purpose), 0):
                sent.setdefault(axis, {})[purpose] = more
    return {category: held.now for category, held in ledger.bytes.items()}, sent


RESTING = [
    (grid, stage, dtype, what)
    for grid in ("1", "dp2", "pp2 dp2", "dp4 shard2")
    for stage in (1, 2, 3)
    for dtype in ("fp32", "bf16", "bf16-param")
    for what in (WHAT if stage == 3 else ["optimizer"])
]
RESTING_FEW = pairwise(RESTING)[:12]


@pytest.mark.parametrize(
    ("grid", "stage", "dtype", "what"),
    [pytest.param(*case, marks=() if case in RESTING_FEW else pytest.mark.full) for case in RESTING],
)
def test_what_rests_where_and_what_is_read_and_written(grid: str, stage: int, dtype: str, what: str) -> None:
    """To the byte, as plan has it: memory of each category that rests, and traffic with host and disks."""
    layout = replace(laid_out(grid, 2, stage), **WHAT[what])
    job = planned(layout, SHAPES["deep"], DTYPES[dtype])
    for number, (held, sent) in enumerate(run_ranks(layout.ranks, counted, layout, DTYPES[dtype], **axes_of(layout))):
        rank = number // (layout.tensor * layout.data) if layout.pipeline > 1 else 0
        expected = memory(job, rank).held
        for category in sorted(
            {*expected, *held} - {"activations", "staging", "host_staging", "host_pieces", "angles"}
        ):
            assert held.get(category, 0) == expected.get(category, 0), (number, category)
        for axis in ("host", "disk"):
            assert sent.get(axis, {}) == traffic(job, rank).get(axis, {}), (number, axis)


def axes_of(layout: Job) -> dict[str, Any]:
    return {"tensor": layout.tensor, "pipeline": layout.pipeline, "shard": layout.shard_ranks}


def test_memory_for_what_is_on_its_way_is_bounded() -> None:
    layout = replace(layout_of("1", 2, 3), offload_optimizer="nvme", offload_parameters="nvme")
    (found,) = run_ranks(1, peak_of_pieces, layout)
    assert found <= 1 << 24


def peak_of_pieces(grid: Grid, layout: Job) -> int:
    rank = Rank(grid, layout, SHAPES["deep"], DTYPES["fp32"])
    for step in range(3):
        rank.step(step)
    return grid.comm.ledger.bytes["host_pieces"].peak


def announced(grid: Grid, layout: Job) -> int:
    """The reads of parameters that are announced in a step, before a gather waits for them."""
    rank = Rank(grid, layout, SHAPES["deep"], DTYPES["fp32"])
    rank.step(0)
    shards = {id(unit.resting.parameters.values) for unit in rank.engine.units}
    with patch.object(Disk, "expect", autospec=True, side_effect=Disk.expect) as expect:
        rank.step(1)
    return sum(id(call.args[1]) in shards for call in expect.call_args_list)


def test_reads_of_parameters_are_announced() -> None:
    layout = replace(layout_of("1", 1, 3), offload_parameters="nvme")
    assert run_ranks(1, announced, layout)[0] >= SHAPES["deep"].layers


def test_state_of_a_unit_has_one_version() -> None:
    """All pieces of masters and moments have seen as many updates, so none is half done."""
    layout = replace(layout_of("1", 1, 3), offload_optimizer="nvme", offload_parameters="nvme")
    (found,) = run_ranks(1, versions, layout)
    assert found == [[{3}] * 3] * len(found)


def versions(grid: Grid, layout: Job) -> list[list[set[int]]]:
    rank = Rank(grid, layout, SHAPES["deep-untied"], DTYPES["fp32"])
    for step in range(3):
        rank.step(step)
    engine = rank.engine
    disks: Any = engine.units[0].resting.paged
    states = {unit: engine.optimizer.runs(unit)[0].state.values() for unit in engine.units}
    return [[*map(disks.versions, (unit.masters, *states[unit]))] for unit in engine.units]


def test_a_skipped_update_touches_no_disk() -> None:
    layout = replace(layout_of("1", 1, 3), offload_optimizer="nvme", offload_parameters="nvme")
    (before, after) = run_ranks(1, skipped, layout)[0]
    assert before == after


def skipped(grid: Grid, layout: Job) -> tuple[int, int]:
    rank = Rank(grid, layout, SHAPES["deep"], DTYPES["fp32"])
    rank.step(0)
    traffic = grid.comm.ledger.traffic["disk"]
    before = traffic["optimizer out"].bytes_sent
    rank.engine.begin_step()
    rank.passes(1)
    rank.engine._halted.fill_(True)
    assert bool(rank.engine.finish_step(lr=1e-3).skipped) and torch.is_grad_enabled()
    return before, traffic["optimizer out"].bytes_sent
