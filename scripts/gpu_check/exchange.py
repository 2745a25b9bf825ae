"""Measure stages 2 and 3 with all their gathers and reductions, and the host time per layer.

Rank 0 of two is real, the other rank is an echo (`echo.py`): the host, the streams and the memory do all their work for
the communication, but nothing goes over a link. The loss is meaningless and only has to be finite.
"""

from collections.abc import Iterator
from functools import partial

import torch

from megazero.comm.grid import Grid, single
from megazero.kernels.select import choose
from megazero.launcher.monitor import flight_recorder
from scripts.gpu_check import peers
from scripts.gpu_check.echo import echoing, one_rank_group
from scripts.gpu_check.findings import Asked, Row
from scripts.gpu_check.layouts import Case
from scripts.gpu_check.speed import GPT_1_3B, STEPS, WARM_UP, Shape, gpt, measured, stepper

# So small that the GPU waits for its host, and not the host for the GPU.
HOST, HOST_LAYERS = Shape(gpt(24, 64, 2, 16) | {"vocab": 128}, 1), 24


def rows(asked: Asked) -> Iterator[Row]:
    """Yield a GPT of 1.3B in stage 0, then in stages 2 and 3 with their step time as a multiple of stage 0's."""
    shape = GPT_1_3B.of(asked)
    alone = speed_of(0, single(), asked, shape, 4, "stage 0, one rank")
    yield alone
    with one_rank_group(asked) as inner:
        for stage in (2, 3):
            grid = echoing(inner)
            row = speed_of(stage, grid, asked, shape, 4, f"stage {stage}, rank 0 of two, the other an echo")
            if "step_s" in row and "step_s" in alone:
                row["times_stage_0"] = row["step_s"] / alone["step_s"]
            yield row | left_in_queue(asked)


def host(asked: Asked) -> Iterator[Row]:
    """Yield the host's microseconds of a step per layer: plain torch, ours on one rank, ours in every stage."""
    systems = {
        "plain torch": measured("plain torch", partial(peers.plain, HOST, 1, asked, compiled=False), asked, HOST)
    }
    systems["ours, one rank"] = speed_of(0, single(), asked, HOST, 1, "ours, one rank")
    for stage in range(4):
        name = f"ours, stage {stage}, one of two"
        systems[name] = speed_of(stage, echoing(None), asked, HOST, 1, name)
    for name, row in systems.items():
        us = row["host_s"] * 1e6 / HOST_LAYERS if "host_s" in row else None
        yield {"name": name, "host_us": us, "fault": row.get("fault"), "absent": row.get("absent")}


def speed_of(stage: int, grid: Grid, asked: Asked, shape: Shape, micro: int, name: str) -> Row:
    """Measure steps in a stage; return their row with the bytes that this rank sent per step."""
    ops = choose("auto", asked.device, torch.bfloat16)
    case = Case(name, {"stage": stage, "micro_batch": micro, "data": grid["data"].size}, "bf16", "auto")
    row = measured(name, partial(stepper, case, grid, asked, ops, shape), asked, shape)
    return row | {"kernels": ops.name, "sent_gb": grid.comm.ledger.bytes_sent / (WARM_UP + STEPS) / 1e9}


def left_in_queue(asked: Asked) -> Row:
    """Synchronize, then return a fault if the monitor still takes an operation for unfinished."""
    asked.synchronize()
    left = [one.group for one in flight_recorder(True)]
    found: Row = {"operations": len(flight_recorder(False))}
    if asked.device.type == "cuda" and not found["operations"]:
        return found | {"fault": "NCCL's flight recorder holds no operation: the monitor would notice no hang"}
    return found | {"fault": f"still unfinished for the monitor: {', '.join(left)}"} if left else found
