"""Compare each fused CPU operation with the memory bandwidth, its specification and torch's own function.

One process, one thread. Tensors have 24 MiB, so that two of them do not fit into a cache. Four calls are timed for each
operation: *limit*, a pass y = x + 1 over the operation's minimum bytes (half read, half written to memory that is
already mapped); ours; the specification in plain torch; and torch's own function if there is one (`F.layer_norm`). An
operation that reads more than it writes can be faster than its limit. Each row says whose operation
`precision.kernels=auto` selects; where it selects ours, a ratio above 1 is a reason to select the other one.
"""

import ctypes
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels import cpu, reference, schema
from megazero.kernels.select import choose
from scripts.bench.harness import Group, Pair
from scripts.bench.processes import Call, System

HIDDEN, VOCAB, KEY, DROP = 1536, 32768, 0x9E3779B9, 0.1
MEBIBYTES = 24
SEQUENCE, BATCH, HEAD = 512, 2, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
LIMIT, SPECIFIED, TORCH = "limit of ", "specification of ", "torch's "

Work = Callable[[], object]
Case = tuple[str, float, Work, Work, Work | None]  # name, minimum bytes, ours, the specification, torch's


def group_of(dtype: str, mebibytes: int = MEBIBYTES) -> Group:
    """Return the group of all operations in one dtype on tensors of one size."""
    title = f"operations, {dtype}, {mebibytes} MiB"
    system = System(title, calls_of, (dtype, mebibytes), has_loss=False)
    return Group(title, [system], pairs=partial(pairs_of, dtype), again=False)


def pairs_of(dtype: str, calls: Collection[str]) -> list[Pair]:
    """Return the rows of the table: each operation over its limit, its specification, and torch's function."""
    auto = choose("auto", torch.device("cpu"), DTYPES[dtype])
    names = [call for call in calls if LIMIT + call in calls]
    beside = {LIMIT: "the limit", SPECIFIED: "the specification", TORCH: "torch's"}
    return [
        Pair(f"{name} (auto: {_whose(getattr(auto, name.split()[0]))}), of {words}", name, prefix + name)
        for name in names
        for prefix, words in beside.items()
        if prefix + name in calls
    ]


def _whose(operation: object) -> str:
    return "ours" if isinstance(operation, torch._ops.OpOverloadPacket) else "torch's"


def calls_of(dtype: str, mebibytes: int) -> dict[str, Call]:
    """Return the calls that are timed, by name."""
    cpu.load()
    _keep_freed_memory()
    calls: dict[str, Call] = {}
    sizes = DTYPES[dtype], mebibytes << 20
    for name, size, ours, specified, eager in (*_rows_of(*sizes), *_rotary_and_loss(*sizes)):
        x, y = torch.ones(int(size) // 8), torch.ones(int(size) // 8)
        calls[LIMIT + name] = _silent(lambda x=x, y=y: torch.add(x, 1.0, out=y))
        calls[name], calls[SPECIFIED + name] = _silent(ours), _silent(specified)
        if eager is not None:
            calls[TORCH + name] = _silent(eager)
    return calls


def _silent(work: Work) -> Call:
    def call() -> float:
        work()
        return 0.0

    return call


def _keep_freed_memory() -> None:
    """Let malloc keep freed memory: otherwise page faults of new results would take most of the time."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _case(name: str, size: float, *arguments: object, eager: Work | None = None) -> Case:
    ours, plain = getattr(getattr(torch.ops, schema.NAMESPACE), name), getattr(reference, name)
    return name, size, lambda: ours(*arguments), lambda: plain(*arguments), eager


def _rows_of(dtype: torch.dtype, size: int) -> Iterator[Case]:
    """Yield the cases of rows of hidden channels, and of flat memory."""
    item, d = dtype.itemsize, HIDDEN
    n = size // item // d
    one = item * n * d  # bytes of one pass
    x, grad, other = (_draw(dtype, n, d, seed=seed) for seed in range(3))
    weight, bias = _draw(dtype, d, seed=3), _draw(dtype, d, seed=4)
    _, mean, rstd = reference.layer_norm(x, weight, bias, 1e-5)
    narrow = mean.to(dtype), rstd.to(dtype)

    def torch_backward() -> object:
        return torch.ops.aten.native_layer_norm_backward(grad, x, [d], *narrow, weight, bias, [True] * 3)

    yield _case("layer_norm", 2 * one, x, weight, bias, 1e-5, eager=lambda: F.layer_norm(x, [d], weight, bias))
    yield _case("layer_norm_backward", 3 * one, grad, x, mean, rstd, weight, eager=torch_backward)
    yield _case("rms_norm", 2 * one, x, weight, 1e-5, eager=lambda: F.rms_norm(x, [d], weight))
    yield _case("rms_norm_backward", 3 * one, grad, x, rstd, weight)
    yield _case("add_layer_norm", 4 * one, x, other, weight, bias, 1e-5)
    yield _case("add_layer_norm_backward", 4 * one, grad, other, x, mean, rstd, weight)
    yield _case("add_rms_norm", 4 * one, x, other, weight, 1e-5)
    yield _case("add_rms_norm_backward", 4 * one, grad, other, x, rstd, weight)
    yield _case("bias_gelu", 2 * one, x, bias)
    yield _case("bias_gelu_backward", 3 * one, grad, x, bias)
    yield _case("sum_rows_", one, torch.empty(d, device=x.device), x, False, eager=lambda: x.sum(0))
    yield _case("swiglu", 3 * one, x, other)
    yield _case("swiglu_backward", 5 * one, grad, x, other)
    site = torch.arange(8), torch.arange(n // 8), KEY, DROP
    cubes = [each[: n // 8 * 8].view(-1, 8, d) for each in (x, other)]
    yield _case("dropout_add", 3 * one, *cubes, *site, eager=lambda: F.dropout(cubes[0], DROP) + cubes[1])
    yield _case("dropout_backward", 2 * one, cubes[0], *site)
    flat, wide = x.flatten(), torch.zeros(n * d)
    yield _case("sums_of_squares", one, [flat])
    yield _case("accumulate_", one + 8 * n * d, wide, flat)
    converted = torch.empty_like(flat, dtype=torch.bfloat16 if item == 4 else torch.float32)
    yield _case("cast_", 6 * n * d, converted, flat)


def _rotary_and_loss(dtype: torch.dtype, size: int) -> Iterator[Case]:
    item, numel = dtype.itemsize, size // dtype.itemsize
    heads = _draw(dtype, SEQUENCE, BATCH, numel // (SEQUENCE * BATCH * HEAD), HEAD, seed=0)
    half = _draw(dtype, SEQUENCE, 1, 1, HEAD // 2, seed=1)
    angles = torch.cat((half, half), -1)
    yield _case("rotary", 2 * item * heads.numel(), heads, angles.cos(), angles.sin(), False)
    rows = numel // VOCAB
    logits, targets, ones = _draw(dtype, rows, VOCAB, seed=4), torch.arange(rows), torch.ones(rows)
    # Both calls overwrite the logits again and again; values do not affect the time as long as they are finite.
    eager = lambda: F.cross_entropy(logits, targets)  # noqa: E731
    yield _case("cross_entropy_parts_", item * logits.numel(), logits, targets, eager=eager)
    yield _case("cross_entropy_backward_", 2 * item * logits.numel(), logits, 4 * ones, 14 * ones, targets, ones)


def _draw(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
