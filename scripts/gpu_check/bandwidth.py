"""Measure each kernel's bytes per second beside a copy's, and its time beside torch eager's and torch.compile's.

All systems of one operation take turns, round after round, on the same arguments; reported are medians. Bytes are those
that the operation must move, whatever moves them, so a kernel that moves more looks slower, not better. The arguments
are several times the level-2 cache.

Columns: microseconds of ours, GB/s of ours, its share of the copy's speed and the share that is wanted, and how many
times as long as ours the others take.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero.kernels import reference
from scripts.gpu_check.findings import Asked, Row, told
from scripts.gpu_check.kernels import missing
from scripts.gpu_check.samples import SAMPLES, Arguments, Draw, Sizes, least_bytes, results
from scripts.gpu_check.timing import medians

TINY = Sizes(8, 2, 64, 96, 128, 2, 16, 4096)
LARGE = Sizes(2048, 8, 4096, 16_384, 131_072, 16, 128, 1 << 28)
HIDDEN = (2048, 8192, 16_384)  # norms are timed at these widths as well, with as many elements


def target(name: str) -> float | None:
    """Return the share of the copy's speed that we want: 0.90 of an update, 0.88 forward, 0.80 backward."""
    if name == "adamw_":
        return 0.90
    if name.startswith(("cross", "sum")):
        return None
    return 0.80 if name.endswith("backward") else 0.88


def rows(asked: Asked) -> Iterator[Row]:
    """Yield all operations in bf16, between two measurements of the copy's speed."""
    if (absent := missing(asked.device)) is not None:
        yield absent
        return
    copy = copy_speed(asked)
    yield {"name": "copy, read and written", "gb_per_s": copy / 1e9}
    base = TINY if asked.tiny else LARGE
    for name in SAMPLES:
        yield _tried(name, base, asked, asked.on_gpu, copy)
        if "norm" in name and not asked.tiny:
            for hidden in HIDDEN:
                sizes = Sizes(base.sequence * base.hidden // hidden, base.batch, hidden, 1, 1, 1, 2, 1)
                yield _tried(name, sizes, asked, False, copy)
    yield {"name": "copy, afterwards", "gb_per_s": copy_speed(asked) / 1e9}


def copy_speed(asked: Asked) -> float:
    """Return the bytes per second of a large copy on the device, those read and those written."""
    generator = torch.Generator(asked.device).manual_seed(0)
    x = Draw(torch.float32, generator)(1 << (12 if asked.tiny else 29))
    y = torch.empty_like(x)
    (found,) = medians([lambda: y.copy_(x)], asked.device)
    assert isinstance(found, float), found
    return 2 * x.numel() * x.element_size() / found


def _tried(name: str, sizes: Sizes, asked: Asked, compiling: bool, copy: float) -> Row:
    try:
        return _timed(name, sizes, asked, compiling, copy)
    except Exception as error:
        return {"name": name, "fault": told(error)}


def _timed(name: str, sizes: Sizes, asked: Asked, compiling: bool, copy: float) -> Row:
    arguments = SAMPLES[name](Draw(torch.bfloat16, torch.Generator(asked.device).manual_seed(0)), sizes)
    moved = least_bytes(name, arguments, results(torch.ops.megazero, name, arguments))
    eager = _eager(name)
    systems: dict[str, Callable[..., Any]] = {"ours": getattr(torch.ops.megazero, name), "eager": eager}
    if compiling:
        systems["compiled"] = torch.compile(eager)
    found = medians([_bound(system, arguments) for system in systems.values()], asked.device)
    ours, *others = found
    if isinstance(ours, str):
        return {"name": name, "fault": ours}
    rate, shape = moved / ours, next(each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)).shape
    row: Row = {"name": name, "size": "x".join(map(str, shape)), "us": ours * 1e6, "gb_per_s": rate / 1e9}
    row |= {"of_copy": rate / copy, "wanted": target(name)}
    for system, other in zip(list(systems)[1:], others, strict=True):
        row[f"{system}_times"] = other if isinstance(other, str) else other / ours
    return row


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
