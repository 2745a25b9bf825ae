"""Measure the steps of a GPT of 1.3B parameters in bf16, as a run computes them: the host waits for none of them.

MFU is by the planner's formula (`plan/model.py`): model FLOPs of PaLM, appendix B, over the chip's dense peak, which no
CPU has. Recomputation does not count.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megazero.build.assemble import assemble, feeds_of
from megazero.build.pipeline import model_shape
from megazero.build.upload import Upload
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.data.windows import MicroBatch
from megazero.kernels.operations import Operations
from megazero.plan.hardware import peak_flops
from megazero.zero.engine import Engine
from scripts.gpu_check.findings import Asked, Row, told
from scripts.gpu_check.layouts import MODEL, Case, config_of

TINY = MODEL | {"layers": 2, "dropout": 0.0}
LARGE = TINY | {
    "layers": 24,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "ffn": 8192,
    "vocab": 50_304,
    "seq_len": 2048,
}
SEQUENCES = 8  # of a step, on each data rank
WARM_UP, STEPS, LR = 3, 6, 3e-4
Step = Callable[[int], Tensor]


def model_of(asked: Asked) -> dict[str, Any]:
    return TINY if asked.tiny else LARGE


def measured(name: str, case: Case, grid: Grid, asked: Asked, ops: Operations) -> Row:
    """Return a row of some steps: with recompute where they do not fit into memory without."""
    with suppress(torch.OutOfMemoryError):
        return _tried(name, case, grid, asked, ops)
    _free(asked)
    again = replace(case, how=case.how | {"recompute": "full"})
    return _tried(f"{name}, recomputed", again, grid, asked, ops)


def stepper(case: Case, grid: Grid, asked: Asked, ops: Operations) -> Step:
    """Return a function that trains a step of random tokens, and returns its loss on the device."""
    model, data, device = model_of(asked), grid["data"], asked.device
    batch = SEQUENCES * data.size
    config = config_of(case, model, batch)
    # Its initial values would take the host a minute.
    built = assemble(config, grid, device, ops, Host(device, grid.comm.ledger), None)
    fill(built.engine, seed=data.rank)
    feed, upload = feeds_of(grid["tensor"], device, False), Upload(device)
    generator = torch.Generator().manual_seed(data.rank)

    def step(number: int) -> Tensor:
        window = torch.randint(0, model["vocab"], (model["seq_len"] + 1, SEQUENCES), generator=generator)
        batches = [_micro_batch(part) for part in window.split(case.job.micro_batch, dim=1)]
        batches = upload.pack(batches)() if asked.on_gpu else batches
        built.engine.begin_step()
        built.pipeline.train(batches, lambda each: feed(each, number, True))
        return built.engine.finish_step(LR).loss

    return step


def fill(engine: Engine, seed: int) -> None:
    """Set the masters to normal numbers of the model's scale, and the weights of norms to 1, and publish them."""
    generator = torch.Generator(engine.units[0].device).manual_seed(seed)
    for unit in engine.units:
        masters = unit.masters
        for interval in unit.layout.intervals:
            part = masters[max(interval.start - unit.shard.start, 0) : max(interval.stop - unit.shard.start, 0)]
            part.fill_(1.0) if interval.name.endswith("norm.weight") else part.normal_(0, 0.02, generator=generator)
        unit.resting.round_masters()
        engine.gather.publish(unit)


def _micro_batch(window: Tensor) -> MicroBatch:
    tokens_SB, targets_SB = window[:-1].clone(), window[1:].clone()
    valid_SB = torch.ones_like(tokens_SB, dtype=torch.bool)
    return MicroBatch(tokens_SB, targets_SB, valid_SB, None, None, torch.arange(window.shape[1]))


def _tried(name: str, case: Case, grid: Grid, asked: Asked, ops: Operations) -> Row:
    """Return the row; or why there is none, so that others can be."""
    try:
        return _measured(name, case, grid, asked, ops)
    except torch.OutOfMemoryError as error:
        if case.job.recompute == "none":
            raise
        return {"name": name, "fault": told(error)}
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "fault": told(error)}


def _measured(name: str, case: Case, grid: Grid, asked: Asked, ops: Operations) -> Row:
    if asked.on_gpu:
        torch.cuda.reset_peak_memory_stats(asked.device)
    step = stepper(case, grid, asked, ops)
    for number in range(WARM_UP):
        step(number)
    asked.synchronize()
    begin = time.perf_counter()
    losses = [step(WARM_UP + number) for number in range(STEPS)]
    host_s = (time.perf_counter() - begin) / STEPS
    asked.synchronize()
    step_s = (time.perf_counter() - begin) / STEPS
    loss = losses[-1].item()
    peak = torch.cuda.max_memory_allocated(asked.device) / 2**30 if asked.on_gpu else 0.0
    del step
    _free(asked)
    model = model_of(asked)
    rate = SEQUENCES * model["seq_len"] / step_s  # of one device
    most = peak_flops(torch.cuda.get_device_name(asked.device), "bf16") if asked.on_gpu else None
    flops = rate * model_shape(config_of(case, model)).flops_per_token()
    row: Row = {"name": name, "step_s": step_s, "host_s": host_s, "tokens_per_s": rate, "tflops": flops / 1e12}
    row |= {"mfu": None if most is None else flops / most, "loss": loss, "peak_gib": peak}
    return row if math.isfinite(loss) else row | {"fault": "the loss is not finite"}


def _free(asked: Asked) -> None:
    gc.collect()  # an engine's units and the views of their gradients hold each other
    if asked.on_gpu:
        torch.cuda.empty_cache()
