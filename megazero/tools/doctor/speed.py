"""Measure how fast one device computes and copies, in a second or two.

    matmul         2 n^3 FLOPs of a product of two n x n matrices, n as large as still takes a fraction of a second
    attention      FLOPs that a causal mask leaves in torch's fused attention, 7 b h s^2 d in forward and backward
    launch         the seconds of an operation on one number, with many of them queued at once
    memory copy    2 n bytes: each is read and written once
    host copy      n bytes between pinned memory of the host and a GPU, in the slower direction

Each runs once to warm up and is then repeated. The best time counts, because a peak is wanted, and other work on the
machine can only slow it down.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megazero.comm.nccl import synchronize

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

_SMALLEST = 256  # rows of a matrix
_LARGEST = {"cpu": 4096, "cuda": 8192}
_LONG = {"cpu": 0.03, "cuda": 0.005}  # seconds of one product that is large enough
_SECONDS = 0.25  # for the repetitions of one measurement
_LEAST, _MOST = 3, 50  # repetitions
_ATTENTION = {"cpu": (1, 8, 512, 64), "cuda": (4, 16, 2048, 128)}  # samples, heads, sequence, head dim
_LAUNCHES = 1000


def matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a product of square matrices."""
    n = _SMALLEST
    while True:
        a, b = (torch.full((n, n), 1 / n, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty_like(a)

        def multiply(a=a, b=b, out=out) -> None:
            torch.mm(a, b, out=out)

        multiply()
        once = seconds_of(multiply, device)
        if once >= _LONG[device.type] or n >= _LARGEST[device.type]:
            return 2 * n**3 / best_seconds(multiply, device)
        n *= 2


def attention_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of fused causal attention, forward and backward (2.5 times the forward's FLOPs)."""
    samples, heads, length, dim = _ATTENTION[device.type]
    grad = torch.ones(samples, heads, length, dim, dtype=dtype, device=device)
    q, k, v = (torch.ones_like(grad, requires_grad=True) for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

    return 7 * samples * heads * length**2 * dim / best_seconds(attend, device)


def launch_seconds(device: torch.device) -> float:
    """Return the seconds of an operation on one number."""
    x = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    return best_seconds(launch, device) / _LAUNCHES


def copy_bandwidth(size: int, device: torch.device) -> float:
    """Return the bytes/s read and written when `size` bytes are copied within the device's memory."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def host_bandwidth(size: int, device: torch.device) -> float:
    """Return the bytes/s between pinned memory of the host and a GPU, in the slower direction."""
    host = torch.zeros(size, dtype=torch.uint8).pin_memory()
    near = torch.zeros(size, dtype=torch.uint8, device=device)
    out = best_seconds(lambda: host.copy_(near, non_blocking=True), device)
    return size / max(out, best_seconds(lambda: near.copy_(host, non_blocking=True), device))


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest call of `work`, after a warm-up call."""
    work()
    until, taken = time.perf_counter() + _SECONDS, []
    while len(taken) < _LEAST or (len(taken) < _MOST and time.perf_counter() < until):
        taken.append(seconds_of(work, device))
    return min(taken)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, including its work on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began
