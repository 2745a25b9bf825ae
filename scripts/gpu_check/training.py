"""Measure the training speed of one GPU: a GPT of 1.3B parameters in bf16, with fused and with reference kernels.

MFU by the formula of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H Q T FLOP a token, with H Q the hidden size
and T the sequence length, over the chip's dense bf16 peak (none is known of a CPU); recomputation does not count.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megazero.build.assemble import build, feeds_of
from megazero.comm.grid import single
from megazero.data.loader import MicroBatch
from megazero.kernels.select import choose
from megazero.plan.hardware import peak_flops
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
WARM_UP, STEPS, LR = 3, 8, 3e-4
ALLOWED = 1e-2  # of the last loss, relative: 11 steps of bf16 with other roundings, no wrong gradient


@dataclass(frozen=True)
class Trained:
    """One choice of kernels: seconds a step, tokens a second, MFU, loss of the last step, GiB at the peak."""

    kernels: str
    step_s: float
    tokens_s: float
    mfu: float | None
    loss: float
    peak_gib: float


def train(device: torch.device, tiny: bool, batch: int) -> list[Trained]:
    """Train with fused, then with reference kernels, from the same weights on the same tokens.

    Args:
        batch: sequences in a step, all in one micro-batch.
    """
    return [_trained(kernels, device, TINY if tiny else LARGE, batch) for kernels in ("fused", "reference")]


def apart(rows: list[Trained]) -> float:
    """Return the largest relative difference of two last losses; NaN if one is."""
    losses = [row.loss for row in rows]
    return (max(losses) - min(losses)) / abs(losses[0]) if all(map(math.isfinite, losses)) else math.nan


def parameters(model: dict[str, Any]) -> int:
    """Return the parameters of the matrices: the blocks' 12 h^2 each, and both embeddings."""
    return 12 * model["layers"] * model["hidden"] ** 2 + (model["vocab"] + model["seq_len"]) * model["hidden"]


def flops_per_token(model: dict[str, Any]) -> float:
    """Return the FLOPs of forward and backward of one token (PaLM, appendix B)."""
    return 6 * parameters(model) + 12 * model["layers"] * model["hidden"] * model["seq_len"]


def _stepper(kernels: str, device: torch.device, model: dict[str, Any], batch: int) -> Callable[[int], float]:
    """Return a function that trains a step, of random tokens, and returns its loss."""
    case = Case("training", {"micro_batch": batch}, dtype="bf16")
    ops = choose(kernels, device, torch.bfloat16)
    built = build(config_of(case, model, batch), single(), device, ops)
    feed = feeds_of(single()["tensor"], device, False)
    generator = torch.Generator().manual_seed(0)

    def step(number: int) -> float:
        window = torch.randint(0, model["vocab"], (model["seq_len"] + 1, batch), generator=generator)
        tokens_SB, targets_SB = window[:-1].clone(), window[1:].clone()
        valid_SB = torch.ones_like(tokens_SB, dtype=torch.bool)
        micro = MicroBatch(tokens_SB, targets_SB, valid_SB, None, None, torch.arange(batch))
        built.engine.begin_step()
        built.pipeline.train([micro], lambda each: feed(each, number, True))
        return built.engine.finish_step(LR).loss.item()

    return step


def _trained(kernels: str, device: torch.device, model: dict[str, Any], batch: int) -> Trained:
    step = _stepper(kernels, device, model, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times, loss = [], 0.0
    for number in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        loss = step(number)  # waits for the device
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    del step
    gc.collect()  # an engine's units and the views of their gradients hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
    tokens, step_s = batch * model["seq_len"], statistics.median(times[WARM_UP:])
    rate = tokens / step_s
    most = peak_flops(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    mfu = None if most is None else flops_per_token(model) * rate / most
    return Trained(kernels, step_s, rate, mfu, loss, peak)
