"""Weights in tiles (`zero.tile_mb`): what one process computes, and bytes held and sent as planned."""

from contextlib import suppress
from dataclasses import replace

import pytest
from torch import Tensor

from megazero.comm.grid import Grid
from megazero.comm.pool import Pool
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.traffic import traffic
from megazero.tools.certify.tolerances import LOSS_FP32, difference
from tests.layouts import SHAPES, Rank, job_on, planned, second_step, train
from tests.ranks import run_ranks
from tests.test_layouts import compare
from tests.zero.test_offload import DTYPES

MOST, FEW_ROWS = 8000, 1000  # elements of a tile: of gpt only the MLP is cut; of either all weights are
LAYOUTS: dict[str, tuple[Job, str, int]] = {
    "one rank": (job_on(1, 1, False, 2, 3), "gpt", MOST),
    "two ranks": (job_on(1, 2, False, 2, 3), "gpt", MOST),
    "gated": (job_on(1, 2, False, 1, 3), "llama", FEW_ROWS),
    "all weights": (job_on(1, 4, False, 2, 3), "gpt", FEW_ROWS),
    "recompute": (job_on(1, 2, False, 2, 3, recompute="full"), "gpt", FEW_ROWS),
    "core recomputed": (job_on(1, 2, False, 2, 3, recompute="selective"), "llama", FEW_ROWS),
    "groups": (job_on(1, 4, False, 2, 3, shard_ranks=2), "gpt", FEW_ROWS),
    "neighbours": (job_on(1, 4, False, 2, 3, secondary_ranks=2, recompute="full"), "gpt", FEW_ROWS),
    "tensor": (job_on(2, 2, False, 2, 3), "gpt", FEW_ROWS),
    "tensor, sequence": (job_on(2, 2, True, 2, 3, recompute="full"), "llama", FEW_ROWS),
    "pipeline": (job_on(1, 2, False, 4, 3, pipeline=2), "gpt", FEW_ROWS),
    "split backward": (job_on(1, 2, False, 4, 3, pipeline=2, schedule="zb-h1"), "llama", FEW_ROWS),
    "offloaded": (job_on(1, 2, False, 2, 3, offload_optimizer=True, offload_parameters=True), "gpt", FEW_ROWS),
    "on disks": (job_on(1, 2, False, 2, 3, disk_optimizer=True, disk_parameters=True), "gpt", MOST),
    "alone on the host": (job_on(1, 1, False, 2, 3, offload_parameters=True), "llama", FEW_ROWS),
}
FEW = ("gated", "recompute", "tensor, sequence", "split backward", "offloaded")


def cases(*dtypes: str) -> list:
    """All layouts in all of these; few of them, in the last, are quick."""
    every = [(name, dtype) for name in LAYOUTS for dtype in dtypes]
    quick = [(name, dtypes[-1]) for name in FEW]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.full) for case in every]


def tiled(name: str, dtype: str) -> tuple[Job, str]:
    job, flavour, most = LAYOUTS[name]
    return replace(job, tile_mb=most * DTYPES[dtype].parameters.itemsize / 2**20), flavour


@pytest.mark.parametrize(("name", "dtype"), cases("fp32", "fp64"))
def test_it_computes_what_one_process_does(name: str, dtype: str) -> None:
    job, flavour = tiled(name, dtype)
    found = train(job, flavour, DTYPES[dtype])
    if job.disk_optimizer:  # an update from disks leaves gradients as they are
        found = replace(
            found,
            gradients=train(
                replace(job, disk_optimizer=False, disk_parameters=False), flavour, DTYPES[dtype]
            ).gradients,
        )
    compare(found, flavour, dtype)


@pytest.mark.parametrize(("name", "dtype"), cases("fp32", "bf16"))
def test_what_is_sent_and_held_is_planned(name: str, dtype: str) -> None:
    job, flavour = tiled(name, dtype)
    plan, across = planned(job, SHAPES[flavour], DTYPES[dtype]), job.tensor * job.data
    where = {"tensor": job.tensor, "pipeline": job.pipeline, "shard": job.neighbours}
    found = run_ranks(job.ranks, second_step, job, flavour, DTYPES[dtype], **where)
    for number, (sent, held) in enumerate(found):
        stage, expected = number // across, memory(plan, number // across, fused=False).held
        assert traffic(plan, stage, number % across // job.tensor) == sent, f"rank {number}"
        for category in held.keys() & expected.keys():
            assert held[category] == expected[category], (number, category)
        assert held.get("pool", 0) == expected.get("pool", 0), number


WIDE = replace(SHAPES["gpt"], ffn=4096)
WEIGHT = WIDE.hidden * WIDE.ffn * 4  # bytes of the largest, in fp32


def losses_within(grid: Grid, job: Job, most: int) -> list[float]:
    """The losses of two steps whose buffers may have so many bytes; those of no step where these are too few."""
    take, losses = Pool.take, []

    def limited(pool: Pool, numel: int) -> Tensor:
        buffer = take(pool, numel)
        if grid.comm.ledger.bytes["pool"].now > most:
            raise MemoryError
        return buffer

    with pytest.MonkeyPatch.context() as patch, suppress(MemoryError):
        patch.setattr(Pool, "take", limited)
        rank = Rank(grid, job, WIDE, DTYPES["fp32"])
        losses.extend(rank.step(step).loss.item() for step in range(2))
    return losses


def test_a_block_that_does_not_fit_trains() -> None:
    """In buffers of no more bytes than its largest weight has; without tiles there is not one step."""
    whole = job_on(1, 2, False, 2, 3)
    tiles = replace(whole, tile_mb=WEIGHT / 16 / 2**20)
    (found, _), (expected, _), (nothing, _) = (
        run_ranks(2, losses_within, job, most, fresh=True)
        for job, most in ((tiles, WEIGHT), (whole, 100 * WEIGHT), (whole, WEIGHT))
    )
    assert nothing == [] and len(found) == 2
    assert difference(found, expected) <= LOSS_FP32
