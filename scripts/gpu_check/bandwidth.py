"""Compare each kernel's bytes per second with a copy's, and its time with torch eager's and torch.compile's.

All systems of one operation take turns, round after round, on the same arguments; the figures are medians. Bytes are
the minimum that the operation must move, so a kernel that moves more looks slower, not better. The arguments are
several times as large as the level-2 cache. torch.compile takes some seconds per operation, so it compiles only six.

Columns: microseconds and GB/s of ours, the share of the copy's speed (aims: 0.90 for an update, 0.88 forward, 0.80
backward), and the time of the others as a multiple of ours. Cross entropy is forward and backward of 4,096 rows of
logits; ours and Liger's overwrite the logits with the gradient, so each call of every system first copies the logits.
`copy_times` is the time of that copy.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero.kernels import reference
from megazero.kernels.samples import SAMPLES, Arguments, Draw, Sizes, results
from megazero.kernels.select import choose
from megazero.kernels.timing import medians
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.kernels import missing

TINY = Sizes(8, 2, 64, 96, 128, 2, 16, 4096)
LARGE = Sizes(2048, 8, 4096, 16_384, 131_072, 16, 128, 1 << 28)
COMPILED = ("layer_norm", "layer_norm_backward", "bias_gelu", "bias_gelu_backward", "swiglu_backward")
ROWS, VOCAB = 4096, 128_256
_UNREAD = {"adamw_": 4, "cast_": 0, "quantize_": 0, "dequantize_": 0}  # place of a written argument that is not read
HIDDEN = (2048, 8192, 16_384)  # norms are also timed at these widths, with the same number of elements


def rows(asked: Asked) -> Iterator[Row]:
    """Yield all operations in bf16, between two measurements of the copy's speed."""
    if (absent := missing(asked.device)) is not None:
        yield absent
        return
    copy = copy_speed(asked)
    yield {"name": "copy, read and written", "gb_per_s": copy / 1e9}
    base = TINY if asked.tiny else LARGE
    for name in SAMPLES:
        yield _tried(name, base, asked, asked.on_gpu and name in COMPILED, copy)
        if "norm" in name and not asked.tiny:
            for hidden in HIDDEN:
                sizes = Sizes(base.sequence * base.hidden // hidden, base.batch, hidden, 1, 1, 1, 2, 1)
                yield _tried(name, sizes, asked, False, copy)
    yield _loss(asked)
    yield {"name": "copy, afterwards", "gb_per_s": copy_speed(asked) / 1e9}


def copy_speed(asked: Asked) -> float:
    """Return the bytes per second of a large copy on the device: bytes read plus bytes written."""
    generator = torch.Generator(asked.device).manual_seed(0)
    x = Draw(torch.float32, generator)(1 << (12 if asked.tiny else 29))
    y = torch.empty_like(x)
    (found,) = medians([lambda: y.copy_(x)], asked.device)
    assert isinstance(found, float), found
    return 2 * x.numel() * x.element_size() / found


def least_bytes(name: str, arguments: Arguments, found: tuple[Tensor, ...]) -> int:
    """Return the bytes of a pass that reads every argument once and writes every result once."""
    read = sum(
        each.numel() * each.element_size()
        for place, argument in enumerate(arguments)
        for each in pytree.tree_leaves(argument)
        if isinstance(each, Tensor) and place != _UNREAD.get(name)
    )
    return read + sum(each.numel() * each.element_size() for each in found)


def _tried(name: str, sizes: Sizes, asked: Asked, compiling: bool, copy: float) -> Row:
    try:
        return _timed(name, sizes, asked, compiling, copy)
    except Exception as error:
        return {"name": name, "fault": error_line(error)}


def _timed(name: str, sizes: Sizes, asked: Asked, compiling: bool, copy: float) -> Row:
    arguments = SAMPLES[name](Draw(torch.bfloat16, torch.Generator(asked.device).manual_seed(0)), sizes)
    moved = least_bytes(name, arguments, results(torch.ops.megazero, name, arguments))
    eager = _eager(name)
    systems: dict[str, Callable[..., Any]] = {"ours": getattr(torch.ops.megazero, name), "eager": eager}
    if compiling:
        systems["compiled"] = torch.compile(eager)
    shape = next(each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)).shape
    row = _compared(name, shape, {each: partial(call, *arguments) for each, call in systems.items()}, asked)
    if "us" in row:
        rate = moved / row["us"] * 1e6
        row |= {"gb_per_s": rate / 1e9, "of_copy": rate / copy}
    return row


def _compared(name: str, shape: Sequence[int], systems: dict[str, Callable[[], object]], asked: Asked) -> Row:
    """Return the time of the first system, and the times of the others as multiples of it."""
    first, *others = medians(list(systems.values()), asked.device)
    row: Row = {"name": name, "size": "x".join(map(str, shape))}
    if isinstance(first, str):
        return row | {"fault": first}
    for system, other in zip(list(systems)[1:], others, strict=True):
        row[f"{system}_times"] = other if isinstance(other, str) else other / first
    return row | {"us": first * 1e6}


def _loss(asked: Asked) -> Row:
    """Time our cross entropy and compare it with others."""
    count, vocab = (64, 64) if asked.tiny else (ROWS, VOCAB)
    draw = Draw(torch.bfloat16, torch.Generator(asked.device).manual_seed(0))
    source, targets = draw(count, vocab), draw.words(count, low=0, high=vocab)
    logits, slope = torch.empty_like(source), torch.ones(count, device=asked.device)
    ops = choose("auto", asked.device, torch.bfloat16)

    def ours() -> None:
        logits.copy_(source)
        parts = ops.cross_entropy_parts_(logits, targets)
        _, log_sums = reference.cross_entropy_merge(parts[None])
        ops.cross_entropy_backward_(logits, parts[0], log_sums, targets, slope)

    def eager(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), targets, reduction="none")

    def of(loss: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def call() -> None:
            logits.copy_(source)
            x = logits.detach().requires_grad_()
            torch.autograd.grad(loss(x.view_as(x)).sum(), x)

        return call

    systems: dict[str, Callable[[], object]] = {"ours": ours, "eager": of(eager)}
    systems["copy"] = lambda: logits.copy_(source)
    if asked.on_gpu:
        systems["compiled"] = of(torch.compile(eager))
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss  # type: ignore[import-not-found]

        liger = LigerCrossEntropyLoss()
        systems["liger"] = of(lambda x: liger(x, targets))
    except ImportError:
        print("Liger's cross entropy: liger-kernel is not installed")
    return _compared("cross entropy", (count, vocab), systems, asked)


def _eager(name: str) -> Callable[..., Any]:
    """Return the operation without our kernels: its specification, or a faster function of torch if there is one."""
    if name == "adamw_":
        return _torch_update
    if name == "sums_of_squares":
        return lambda flats: reference.sums_of_pieces(flats, at_once=1 << 24)
    return getattr(reference, name)


def _torch_update(
    master: Tensor, grad: Tensor, first: Tensor, second: Tensor, published: Tensor, step: Tensor, *rest: Any
) -> None:
    """Update with torch's fused AdamW, then copy to the 16-bit parameters."""
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
