"""Measure each kernel's bytes per second beside a copy's, and its time beside torch eager's and torch.compile's.

All systems of one operation take turns, round after round, on the same arguments; reported are medians. Bytes are those
that the operation must move, whatever moves them, so a kernel that moves more looks slower, not better. The arguments
are several times the level-2 cache.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero.kernels import reference
from scripts.gpu_check.samples import SAMPLES, Arguments, Draw, Sizes, least_bytes, results

TINY = Sizes(8, 2, 64, 96, 128, 2, 16, 4096)
LARGE = Sizes(2048, 8, 4096, 16_384, 131_072, 16, 128, 1 << 28)
HIDDEN = (2048, 8192, 16_384)  # norms are timed at these widths as well, with as many elements
ROUND_S = 0.01  # of one system in one round
ROUNDS = 9


@dataclass(frozen=True)
class Timed:
    """One operation: microseconds of each system (None: it failed), GB/s of ours, share of the copy's speed."""

    name: str
    sizes: str
    megabytes: float
    fused_us: float
    eager_us: float | None
    compiled_us: float | None
    gigabytes_s: float
    of_copy: float
    target: float | None


def target(name: str) -> float | None:
    """Return the share of the copy's speed that we want: 0.90 of an update, 0.88 forward, 0.80 backward."""
    if name == "adamw_":
        return 0.90
    if name.startswith(("cross", "sum")):
        return None
    return 0.80 if name.endswith("backward") else 0.88


def copy_speed(device: torch.device, tiny: bool) -> float:
    """Return the bytes per second of a large copy on the device, those read and those written."""
    x = Draw(torch.float32, torch.Generator(device).manual_seed(0))(1 << (12 if tiny else 29))
    y = torch.empty_like(x)
    (seconds,) = _medians([lambda: y.copy_(x)], device)
    assert seconds is not None
    return 2 * x.numel() * x.element_size() / seconds


def measure(device: torch.device, tiny: bool, compiling: bool, copy: float) -> Iterator[Timed | None]:
    """Yield all operations in bf16; None for one that fails, which has been said."""
    base = TINY if tiny else LARGE
    for name in SAMPLES:
        yield _tried(name, base, device, compiling, copy)
        if "norm" in name and not tiny:
            for hidden in HIDDEN:
                sizes = Sizes(base.sequence * base.hidden // hidden, base.batch, hidden, 1, 1, 1, 2, 1)
                yield _tried(name, sizes, device, False, copy)


def _tried(name: str, sizes: Sizes, device: torch.device, compiling: bool, copy: float) -> Timed | None:
    try:
        return _timed(name, sizes, device, compiling, copy)
    except Exception as error:
        print(f"{name}: {_told(error)}")
        return None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def _timed(name: str, sizes: Sizes, device: torch.device, compiling: bool, copy: float) -> Timed:
    arguments = SAMPLES[name](Draw(torch.bfloat16, torch.Generator(device).manual_seed(0)), sizes)
    moved = least_bytes(name, arguments, results(torch.ops.megazero, name, arguments))
    eager = _eager(name)
    systems: list[Callable[..., Any]] = [getattr(torch.ops.megazero, name), eager]
    if compiling:
        systems.append(torch.compile(eager))
    runs = [_bound(system, arguments) for system in systems]
    fused, eager_s, compiled_s = (*_medians(runs, device), None)[:3]
    assert fused is not None, f"{name} failed"
    rate, shape = moved / fused, next(each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)).shape
    shown = "x".join(map(str, shape))
    return Timed(
        *(name, shown, moved / 1e6, fused * 1e6),
        eager_us=eager_s and eager_s * 1e6,
        compiled_us=compiled_s and compiled_s * 1e6,
        gigabytes_s=rate / 1e9,
        of_copy=rate / copy,
        target=target(name),
    )


def _bound(system: Callable[..., Any], arguments: Arguments) -> Callable[[], Any]:
    return lambda: system(*arguments)


def _eager(name: str) -> Callable[..., Any]:
    """Return what one writes without kernels: the specification, or torch's own where it has a better one."""
    if name == "adamw_":
        return _torch_update
    if name == "sums_of_squares":
        return lambda flats: reference.sums_of_squares(flats, at_once=1 << 24)
    return getattr(reference, name)


def _torch_update(
    master: Tensor, grad: Tensor, first: Tensor, second: Tensor, published: Tensor, step: Tensor, *rest: Any
) -> None:
    """Update with torch's fused AdamW, and a copy."""
    divide_by, skip, lr, beta1, beta2, eps, decay = rest
    torch.ops.aten._fused_adamw_(
        *([master], [grad], [first], [second], [], [step]),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divide_by,
        found_inf=skip,
    )
    published.copy_(master)


def _medians(runs: list[Callable[[], Any]], device: torch.device) -> list[float | None]:
    """Return the median seconds of each, the systems taking turns; None of one that raises."""
    counts: list[int] = []
    for run in runs:
        try:
            for _ in range(3):
                run()
            once = _seconds(run, 3, device)
            counts.append(max(1, min(200, int(ROUND_S / once))))
        except Exception as error:  # a compiler or a GPU without memory for it: the others go on
            print(f"    left out: {_told(error)}")
            counts.append(0)
    rounds = [
        [_seconds(run, n, device) if n else None for run, n in zip(runs, counts, strict=True)] for _ in range(ROUNDS)
    ]
    return [statistics.median(column) if None not in column else None for column in zip(*rounds, strict=True)]


def _seconds(run: Callable[[], Any], times: int, device: torch.device) -> float:
    """Return the mean seconds of one call, `times` of them queued at once."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(times):
        run()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1e3 / times
