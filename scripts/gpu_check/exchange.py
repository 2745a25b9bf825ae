"""Measure stage 3 with all its gathers and reductions, beside stage 0, which exchanges nothing.

With several GPUs each has a rank, and NCCL carries all of it. With one GPU there is rank 0 of two, whose other rank is
an echo (`echo.py`): all that its host, its streams and its memory do for the exchange is done, nothing goes over a
link. Its loss is of no real model, and only has to be finite.
"""

from collections.abc import Iterator

import torch

from megazero.comm.grid import Grid, single
from megazero.kernels.select import choose
from scripts.gpu_check import ranks
from scripts.gpu_check.echo import echoing, one_rank_group
from scripts.gpu_check.findings import Asked, Row
from scripts.gpu_check.layouts import Case
from scripts.gpu_check.speed import STEPS, WARM_UP, measured

MICRO_BATCH = 4
STAGES = (2, 3)


def rows(asked: Asked) -> Iterator[Row]:
    """Yield stage 0 alone, then stages with their exchange, and how much longer their steps are."""
    alone = speed_of(0, single(), asked, "stage 0, one rank")
    yield alone
    gpus = torch.cuda.device_count() if asked.on_gpu else 0
    if gpus > 1:
        for row in ranks.speeds(gpus, asked, STAGES):
            yield beside(row, alone)
        return
    with one_rank_group(asked) as inner:
        for stage in STAGES:
            grid = echoing(inner)
            row = speed_of(stage, grid, asked, f"stage {stage}, rank 0 of two, the other an echo")
            yield beside(row | left_in_queue(grid, asked), alone)


def speed_of(stage: int, grid: Grid, asked: Asked, name: str) -> Row:
    """Return the row of some steps in a stage, with the bytes that this rank sent in each."""
    ops = choose("auto", asked.device, torch.bfloat16)
    case = Case(name, {"stage": stage, "micro_batch": MICRO_BATCH, "data": grid["data"].size}, dtype="bf16")
    row = measured(name, case, grid, asked, ops)
    sent = grid.comm.ledger.bytes_sent / (WARM_UP + STEPS)
    return row | {"kernels": ops.name, "sent_gb": sent / 1e9}


def beside(row: Row, alone: Row) -> Row:
    """Return a row with how much longer its steps are than those of stage 0."""
    both = "step_s" in row and "step_s" in alone
    return row | {"times_stage_0": row["step_s"] / alone["step_s"]} if both else row


def left_in_queue(grid: Grid, asked: Asked) -> Row:
    """Return a fault if the monitor's queue takes for unfinished what has ended: nothing is under way any more."""
    asked.synchronize()
    queue = grid.comm.device_queue
    assert queue is not None, "see `echoing`"
    left = [queued.axis for queued in queue.unfinished()]
    put, ended = queue.moves
    found: Row = {"operations": put, "found_ended": ended}
    return found | {"fault": f"still unfinished for the monitor: {', '.join(left)}"} if left else found
