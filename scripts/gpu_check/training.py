"""Training speed of one GPU: a GPT of 1.3B parameters in bf16, with fused and with reference kernels.

MFU by the formula of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H Q T FLOP a token, with H Q the hidden size
and T the sequence length, over the chip's dense bf16 peak; recomputation does not count.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from megazero.config import Batch, Config, Model, Precision, resolved
from megazero.kernels.choice import choose
from megazero.parallel.grid import single
from scripts.bench.ours import engine_step

PEAK = 989e12  # dense bf16 FLOP/s of the H100 and H200 SXM, NVIDIA's data sheets
TINY = Model(layers=2, hidden=64, heads=4, vocab=256, seq_len=32)
LARGE = Model(layers=24, hidden=2048, heads=16, vocab=50_304, seq_len=2048)
WARM_UP, STEPS = 3, 8


@dataclass(frozen=True)
class Trained:
    """One choice of kernels: seconds a step, tokens a second, MFU, loss of the last step, GiB at the peak."""

    kernels: str
    step_s: float
    tokens_s: float
    mfu: float
    loss: float
    peak_gib: float


def train(device: torch.device, tiny: bool, batch: int) -> list[Trained]:
    """Fused first, then reference kernels, from the same weights on the same tokens.

    Args:
        batch: sequences in a step, all in one micro-batch.
    """
    return [_trained(kernels, device, TINY if tiny else LARGE, batch) for kernels in ("fused", "reference")]


def parameters(model: Model) -> int:
    """Of the matrices: the blocks' 12 h^2 each, and both embeddings."""
    return 12 * model.layers * model.hidden**2 + (model.vocab + model.seq_len) * model.hidden


def flops_per_token(model: Model) -> float:
    """Of forward and backward (PaLM, appendix B)."""
    return 6 * parameters(model) + 12 * model.layers * model.hidden * model.seq_len


def _trained(kernels: str, device: torch.device, model: Model, batch: int) -> Trained:
    shape = Batch(**{"global": batch, "micro": batch})
    config = resolved(Config(model=model, batch=shape, precision=Precision(dtype="bf16")))
    step = engine_step(config, single(), choose(kernels, device, torch.bfloat16), device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times, loss = [], 0.0
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        loss = step()  # waits for the device
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    del step
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rate = batch * model.seq_len / statistics.median(times[WARM_UP:])
    return Trained(kernels, batch * model.seq_len / rate, rate, flops_per_token(model) * rate / PEAK, loss, peak)
