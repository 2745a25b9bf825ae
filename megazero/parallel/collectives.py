"""The one file that calls torch.distributed's collectives.

Every operation goes along one axis for one purpose. It is counted in the ledger, named in profiles, shown on the
board, and started without waiting where a caller has something else to do: `start_*` returns a `Pending`, whose
`wait()` gives the result. On an axis of size 1 every operation is the identity, and nothing is counted.

On NCCL these are NCCL's own operations. On gloo they are made of sends and receives, for three reasons (measured on
two ranks, 128 MiB: gloo's reduce-scatter 190 to 290 ms against 70 to 90, its all-gather 180 to 245 against 38 to 49):

- they are faster;
- sums are taken in rank order, so they do not depend on how a tensor was cut, and an all-reduce equals a
  reduce-scatter followed by an all-gather bit for bit;
- every message carries a tag made of the operation's number, kind, purpose, dtype and shape. An operation that one
  rank skipped, or called with another shape, never pairs with its successor: the wait runs out and the board tells
  which ranks were where, instead of wrong numbers or an abort deep inside the library.

Tensors must be contiguous: gloo computes wrong sums over strided views without saying so.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.parallel.grid import Axis

# An all-reduce of fewer elements is one exchange of everything with everyone: half the rounds, and nobody cares for
# the bytes. Two ranks always exchange: the bytes are the same.
_FEW = 1 << 14

# Names differ between torch versions: *_single since 2.13, *_tensor before and deprecated since.
_nccl_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_nccl_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveError(RuntimeError):
    """An operation on `axis` did not end: a rank died, does not come, or called another one. The board knows more."""

    def __init__(self, axis: str, reason: str):
        super().__init__(f"{axis} axis: {reason}")
        self.axis = axis


class Pending:
    """An operation under way on one axis.

    Args:
        axis: where it runs; None when there is nothing to wait for.
        purpose: as profiles name it.
        works: torch's handles.
        finish: gives the result once they are done.
    """

    def __init__(self, axis: Axis | None, purpose: str, works: Sequence[dist.Work], finish: Callable[[], Tensor]):
        self._axis, self._purpose, self._works, self._finish = axis, purpose, works, finish

    def wait(self) -> Tensor:
        """The result; to be called once.

        Raises:
            CollectiveError: it did not come within the axis' timeout, or the connection broke.
        """
        if self._axis is None:
            return self._finish()
        with torch.profiler.record_function(f"wait for {self._axis.name} axis: {self._purpose}"):
            _wait(self._axis, self._works)
            result = self._finish()
        self._axis.wire.seat.end(self._axis.name)
        return result


def done(x: Tensor) -> Pending:
    """Nothing to wait for."""
    return Pending(None, "", (), lambda: x)


def start_all_reduce(x: Tensor, axis: Axis, purpose: str) -> Pending:
    """The sum of all ranks' x, in its memory; x must not be touched until the end."""
    if axis.size == 1:
        return done(x)
    tag = _begin("all_reduce", x, axis, purpose, 2 * (axis.size - 1) * _padded(x, axis) // axis.size)
    if axis.wire.backend == "nccl":
        return Pending(axis, purpose, [_work(dist.all_reduce(x, group=axis.group, async_op=True))], lambda: x)
    flat = x.view(-1)
    if axis.size == 2 or flat.numel() <= _FEW:
        received = [torch.empty_like(flat) for _ in _others(axis)]
        works = _exchange(axis, tag, [flat] * len(received), received)

        def add() -> Tensor:
            _sum(axis, flat, received, out=flat)
            return x

        return Pending(axis, purpose, works, add)
    parts = flat.tensor_split(axis.size)
    own = parts[axis.rank]
    received = [torch.empty_like(own) for _ in _others(axis)]
    works = _exchange(axis, tag, [parts[k] for k in _others(axis)], received)

    def add_and_gather() -> Tensor:
        _sum(axis, own, received, out=own)
        _wait(axis, _exchange(axis, tag, [own] * len(received), [parts[k] for k in _others(axis)]))
        return x

    return Pending(axis, purpose, works, add_and_gather)


def start_reduce_scatter(x: Tensor, axis: Axis, purpose: str) -> Pending:
    """This rank's part (of `size` equal parts of the first dim) of the sum of all ranks' x."""
    if axis.size == 1:
        return done(x)
    assert len(x) % axis.size == 0, f"{tuple(x.shape)} has no {axis.size} equal parts"
    tag = _begin("reduce_scatter", x, axis, purpose, (axis.size - 1) * x.numel() // axis.size)
    parts = x.chunk(axis.size)
    out = torch.empty_like(parts[0])
    if axis.wire.backend == "nccl":
        return Pending(axis, purpose, [_work(_nccl_scatter(out, x, group=axis.group, async_op=True))], lambda: out)
    received = [torch.empty_like(out) for _ in _others(axis)]
    works = _exchange(axis, tag, [parts[k] for k in _others(axis)], received)
    return Pending(axis, purpose, works, lambda: _sum(axis, parts[axis.rank], received, out=out))


def start_all_gather(part: Tensor, axis: Axis, purpose: str) -> Pending:
    """All ranks' parts (of equal shape) behind each other along the first dim."""
    if axis.size == 1:
        return done(part)
    tag = _begin("all_gather", part, axis, purpose, (axis.size - 1) * part.numel())
    out = part.new_empty((len(part) * axis.size, *part.shape[1:]))
    if axis.wire.backend == "nccl":
        return Pending(axis, purpose, [_work(_nccl_gather(out, part, group=axis.group, async_op=True))], lambda: out)
    parts = out.chunk(axis.size)
    works = _exchange(axis, tag, [part] * (axis.size - 1), [parts[k] for k in _others(axis)])
    parts[axis.rank].copy_(part)
    return Pending(axis, purpose, works, lambda: out)


def all_reduce(x: Tensor, axis: Axis, purpose: str) -> Tensor:
    return start_all_reduce(x, axis, purpose).wait()


def reduce_scatter(x: Tensor, axis: Axis, purpose: str) -> Tensor:
    return start_reduce_scatter(x, axis, purpose).wait()


def all_gather(part: Tensor, axis: Axis, purpose: str) -> Tensor:
    return start_all_gather(part, axis, purpose).wait()


def gather_bytes(payload: bytes, axis: Axis, purpose: str, device: torch.device) -> list[bytes]:
    """What every rank has to say, in rank order. Nothing is unpickled: callers send JSON or text."""
    if axis.size == 1:
        return [payload]
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths: list[int] = all_gather(length, axis, purpose).tolist()
    row = torch.zeros(1, max(1, *lengths), dtype=torch.uint8, device=device)
    if payload:
        row[0, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    rows = all_gather(row, axis, purpose).cpu().numpy()
    return [rows[i, :n].tobytes() for i, n in enumerate(lengths)]


def _others(axis: Axis) -> list[int]:
    """The other ranks of an axis, each starting behind itself, so that not everybody sends to rank 0 first."""
    return [(axis.rank + i) % axis.size for i in range(1, axis.size)]


def _begin(kind: str, x: Tensor, axis: Axis, purpose: str, elements: int) -> int:
    """Counts, shows and names an operation; returns its tag."""
    assert axis.group is not None, f"{kind} over {axis.size} ranks of the {axis.name} axis without a process group"
    assert x.is_contiguous(), f"{kind} of a strided view: {tuple(x.shape)}, strides {x.stride()}"
    wire = axis.wire
    wire.ledger.add(axis.name, purpose, elements, x.element_size())
    text = f"{kind} ({purpose}, {str(x.dtype).removeprefix('torch.')} {list(x.shape)})"
    number = wire.seat.begin(axis.name, axis.ranks, text)
    return zlib.crc32(f"{number} {text}".encode()) & 0x7FFFFFFF


def _exchange(axis: Axis, tag: int, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> list[dist.Work]:
    """Sends and receives one tensor to and from each of `_others`; neither waits for the other."""
    others = _others(axis)
    try:
        works = [dist.irecv(x, group=axis.group, group_src=k, tag=tag) for k, x in zip(others, receives, strict=True)]
        works += [dist.isend(x, group=axis.group, group_dst=k, tag=tag) for k, x in zip(others, sends, strict=True)]
    except RuntimeError as error:  # the connection is gone
        raise _broken(axis, error) from None
    return [_work(work) for work in works]


def _wait(axis: Axis, works: Sequence[dist.Work]) -> None:
    try:
        for work in works:
            if axis.wire.backend == "nccl":
                work.wait()  # makes the stream wait, not the host
            else:
                work.wait(axis.wire.timeout)
    except RuntimeError as error:
        raise _broken(axis, error) from None


def _broken(axis: Axis, error: RuntimeError) -> CollectiveError:
    return CollectiveError(axis.name, str(error))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not on the axis"
    return work


def _sum(axis: Axis, own: Tensor, received: Sequence[Tensor], out: Tensor) -> Tensor:
    """Adds the parts in rank order, whoever computes it; `out` may be `own`."""
    parts = {axis.rank: own} | dict(zip(_others(axis), received, strict=True))
    first, *rest = (parts[k] for k in range(axis.size))
    if rest[:-1]:  # what is added up in place must be ours: received memory, or the result's
        first = reduce(Tensor.add_, rest[:-1], first.clone() if first is own and out is not own else first)
    return torch.add(first, rest[-1], out=out)


def _padded(x: Tensor, axis: Axis) -> int:
    """Elements of x, rounded up to a multiple of the axis' size."""
    return axis.shard(x.numel()) * axis.size
