"""Start torch.distributed's collectives; no other file calls them.

Every operation runs along one axis for one purpose. It is counted in the ledger, named in profiles and shown on the
status board. `start_*` starts an operation without waiting and returns a `Pending`, whose `wait()` returns the result.
On an axis of size 1 every operation is the identity, and nothing is counted.

On NCCL these are NCCL's own operations. On gloo they are made of messages (`transport/exchange.py`), for three reasons:

- on one host the data goes through shared memory (`transport/shared_memory.py`); through sockets it goes in pieces,
  each of which is summed or copied to its place on arrival;
- sums are taken in rank order, so they do not depend on how a tensor was cut, and an all-reduce equals a
  reduce-scatter followed by an all-gather bit for bit;
- every message carries a tag made of the operation's number, kind, purpose, dtype and shape. If a rank skips an
  operation or calls it with another shape, its messages do not pair with those of the next one: the wait times out and
  the board shows the operation of each rank, instead of wrong numbers or an abort deep inside the library.

Tensors of a device that gloo cannot send from are copied to host memory (`transport/host_staging.py`): messages are
made from the copy, and `wait` copies the result back to the device.

Tensors must be contiguous: gloo computes wrong sums over strided views without an error.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from megazero.comm.grid import Axis
from megazero.comm.pool import same_place
from megazero.comm.transport.exchange import CollectiveError, Consume, Exchange, others, swap
from megazero.comm.transport.host_staging import NOTHING, HostStaging
from megazero.comm.transport.shared_memory import SLOTS

# In an all-reduce of at most this many elements, each rank sends its whole tensor to all others: half the rounds, which
# matters more than the bytes. Two ranks always do this: the bytes are the same.
_FEW = 1 << 14

MOST_UNREAD = SLOTS

# Names differ between torch versions: *_single since 2.13, *_tensor before and deprecated since.
nccl_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
nccl_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """An operation under way on one axis.

    Args:
        axis: the axis it runs on; None when there is nothing to wait for.
        purpose: its name in profiles.
        finish: waits, and returns the result.
        unread: how many messages of this rank stay in shared memory until the others wait for the operation. There is
            room for `MOST_UNREAD`; a rank that sends more is blocked until the others have read some.
    """

    def __init__(self, axis: Axis | None, purpose: str, finish: Callable[[], Tensor], unread: int = 0):
        self._axis, self._purpose, self._finish, self.unread = axis, purpose, finish, unread

    def wait(self) -> Tensor:
        """Wait for the operation and return its result; call it once.

        Raises:
            CollectiveError: the operation did not end within the axis' timeout, or the connection broke.
        """
        if self._axis is None:
            return self._finish()
        if _profiler_enabled():
            with torch.profiler.record_function(f"wait for {self._axis.name} axis: {self._purpose}"):
                result = self._finish()
        else:
            result = self._finish()
        self._axis.comm.status_slot.end(self._axis.name)
        return result

    def then(self, last: Callable[[], Tensor]) -> "Pending":
        """Return this operation with `last` called at its end; the result is the result of `last`."""

        def finish() -> Tensor:
            self._finish()
            return last()

        return Pending(self._axis, self._purpose, finish, self.unread)


def done(x: Tensor) -> Pending:
    """Return a completed operation with the result x."""
    return Pending(None, "", lambda: x)


def start_all_reduce(x: Tensor, axis: Axis, purpose: str) -> Pending:
    """Start an all-reduce (sum) of x in place; x must not be read or written until the end."""
    if axis.size == 1:
        return done(x)
    tag = begin("all_reduce", x, axis, purpose, 2 * (axis.size - 1) * axis.shard(x.numel()))
    if axis.comm.backend == "nccl":
        return nccl_pending(axis, purpose, dist.all_reduce(x, group=axis.group, async_op=True), lambda: x)
    if (pool := axis.comm.host_staging) is not None:
        staging = HostStaging(x, pool)
        return _landing(_reduced(staging.host, axis, tag, purpose), staging, x)
    return _reduced(x, axis, tag, purpose)


def _reduced(x: Tensor, axis: Axis, tag: int, purpose: str) -> Pending:
    """Start an all-reduce (sum) of x in place, made of messages."""
    flat = x.view(-1)
    # The few elements that do not divide by the ranks, or all of a short tensor, are sent whole to all ranks.
    whole = len(flat) if axis.size == 2 or len(flat) <= _FEW else len(flat) % axis.size
    last = flat[len(flat) - whole :]
    rest = [Exchange(axis, tag, [last], _adder(axis, last, last, accumulate=False))] if whole or not len(flat) else []
    if whole == len(flat):
        return _exchanged(axis, purpose, rest[0].start(), x)
    parts = flat[: len(flat) - whole].chunk(axis.size)
    scatter = _scatter(axis, tag, parts, parts[axis.rank], accumulate=False)
    gather = _gather(axis, tag, parts)
    for exchange in (scatter, *rest):
        exchange.start()

    def finish() -> Tensor:
        scatter.wait()
        gather.start()
        for exchange in (*rest, gather):
            exchange.wait()
        return x

    return Pending(axis, purpose, finish)


def start_reduce_scatter(
    x: Tensor, axis: Axis, purpose: str, *, out: Tensor | None = None, accumulate: bool = False
) -> Pending:
    """Start a reduce-scatter (sum) of x: each rank gets its part (of `size` equal parts of the first dim).

    x must not be read or written until the end.

    Args:
        out: memory for the result, which may be this rank's part of x; that part of x is undefined at the end. None:
            new memory.
        accumulate: add the sum to `out`.
    """
    if axis.size == 1:
        assert out is None, "there is nothing to reduce"
        return done(x)
    assert len(x) % axis.size == 0, f"{tuple(x.shape)} has no {axis.size} equal parts"
    tag = begin("reduce_scatter", x, axis, purpose, (axis.size - 1) * x.numel() // axis.size)
    own = _own(x, axis)
    result = torch.empty_like(own) if out is None else out
    if axis.comm.backend == "nccl":
        into = own if accumulate else result  # NCCL takes a rank's own part of the input as output
        work = nccl_scatter(into, x, group=axis.group, async_op=True)
        return nccl_pending(axis, purpose, work, lambda: result.add_(own) if accumulate else result)
    if (pool := axis.comm.host_staging) is not None:
        staging = HostStaging(x, pool)
        parts, into = staging.host.chunk(axis.size), own if accumulate else result
        scatter = _scatter(axis, tag, parts, parts[axis.rank], accumulate=False)
        landed = _landing(_exchanged(axis, purpose, scatter.start(), x), staging, into, axis.rank * into.numel())
        return landed.then(lambda: result.add_(own)) if accumulate else landed
    flat_parts = [part.view(-1) for part in x.chunk(axis.size)]
    scatter = _scatter(axis, tag, flat_parts, result.view(-1), accumulate=accumulate)
    return _exchanged(axis, purpose, scatter.start(), result)


def start_all_gather(part: Tensor, axis: Axis, purpose: str) -> Pending:
    """Start an all-gather: concatenate all ranks' parts (of equal shape) along the first dim."""
    if axis.size == 1:
        return done(part)
    whole = part.new_empty((len(part) * axis.size, *part.shape[1:]))
    _own(whole, axis).copy_(part)
    return start_all_gather_in_place(whole, axis, purpose)


def start_all_gather_in_place(whole: Tensor, axis: Axis, purpose: str) -> Pending:
    """Start an all-gather into `whole`, which already holds this rank's part."""
    if axis.size == 1:
        return done(whole)
    assert len(whole) % axis.size == 0, f"{tuple(whole.shape)} has no {axis.size} equal parts"
    own = _own(whole, axis)
    tag = begin("all_gather", own, axis, purpose, (axis.size - 1) * own.numel())
    if axis.comm.backend == "nccl":
        return nccl_pending(axis, purpose, nccl_gather(whole, own, group=axis.group, async_op=True), lambda: whole)
    if (pool := axis.comm.host_staging) is not None:
        place = _own_elements(whole.view(-1), axis)
        staging = HostStaging(whole, pool, place)
        gather = _gather(axis, tag, staging.host.chunk(axis.size))

        def land() -> Tensor:  # copies only the other ranks' parts
            for part in (slice(0, place.start), slice(place.stop, whole.numel())):
                whole.view(-1)[part].copy_(staging.host[part])
            staging.end()
            return whole

        return _exchanged(axis, purpose, gather.start(), whole).then(land)
    flat_parts = [part.view(-1) for part in whole.chunk(axis.size)]
    return _exchanged(axis, purpose, _gather(axis, tag, flat_parts).start(), whole)


def start_all_to_all(x: Tensor, out: Tensor, axis: Axis, purpose: str, sent: int | None = None) -> Pending:
    """Start an all-to-all: send part k of `size` equal parts of flat x to rank k.

    `out` receives the other ranks' parts in rank order; this rank's own part of it is undefined at the end. x must not
    be written to until then.

    Args:
        sent: elements to count in the ledger; None: all that are sent to other ranks.
    """
    tag = begin("all_to_all", x, axis, purpose, (axis.size - 1) * len(x) // axis.size if sent is None else sent)
    if axis.comm.backend == "nccl":
        return nccl_pending(axis, purpose, dist.all_to_all_single(out, x, group=axis.group, async_op=True), lambda: out)
    if (pool := axis.comm.host_staging) is not None:
        going, coming = HostStaging(x, pool), HostStaging(out, pool, NOTHING)
        swapped = swap(axis, tag, going.host.chunk(axis.size), coming.host.chunk(axis.size)).start()
        return _landing(_landing(_exchanged(axis, purpose, swapped, out), going), coming, out)
    return _exchanged(axis, purpose, swap(axis, tag, x.chunk(axis.size), out.chunk(axis.size)).start(), out)


def all_reduce(x: Tensor, axis: Axis, purpose: str) -> Tensor:
    """Return the sum of x over the axis, which overwrites x."""
    return start_all_reduce(x, axis, purpose).wait()


def all_gather(part: Tensor, axis: Axis, purpose: str) -> Tensor:
    """Return the parts of all ranks of the axis, in rank order, as one tensor."""
    return start_all_gather(part, axis, purpose).wait()


def gather_bytes(payload: bytes, axis: Axis, purpose: str, device: torch.device) -> list[bytes]:
    """Return every rank's payload, in rank order. Nothing is unpickled: callers send JSON or text."""
    if axis.size == 1:
        return [payload]
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths: list[int] = all_gather(length, axis, purpose).tolist()
    row = torch.zeros(1, max(1, *lengths), dtype=torch.uint8, device=device)
    if payload:
        row[0, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    rows = all_gather(row, axis, purpose).cpu().numpy()
    return [rows[i, :n].tobytes() for i, n in enumerate(lengths)]


def begin(kind: str, x: Tensor, axis: Axis, purpose: str, elements: int) -> int:
    """Count an operation that sends `elements`, and show it on the board; return its messages' tag, 0 on NCCL."""
    assert axis.group is not None, f"{kind} over {axis.size} ranks of the {axis.name} axis without a process group"
    assert x.is_contiguous(), f"{kind} of a strided view: {tuple(x.shape)}, strides {x.stride()}"
    comm = axis.comm
    comm.ledger.add(axis.name, purpose, elements, x.element_size())
    text = _text(kind, purpose, x.dtype, x.shape)
    number = comm.status_slot.begin(axis.name, axis.ranks, text)
    return 0 if comm.backend == "nccl" else zlib.crc32(f"{number} {text}".encode()) & 0x7FFFFFFF


@lru_cache(1024)  # a run has few different operations, and starts each thousands of times
def _text(kind: str, purpose: str, dtype: torch.dtype, shape: torch.Size) -> str:
    """Return an operation's name on the status board; its tag is made from the name."""
    return f"{kind} ({purpose}, {str(dtype).removeprefix('torch.')} {list(shape)})"


def _scatter(axis: Axis, tag: int, parts: Sequence[Tensor], out: Tensor, *, accumulate: bool) -> Exchange:
    """Return the exchange of a reduce-scatter, not started; `parts` are flat."""
    add = _adder(axis, parts[axis.rank], out, accumulate=accumulate)
    return Exchange(axis, tag, [parts[k] for k in others(axis)], add)


def _adder(axis: Axis, own: Tensor, out: Tensor, *, accumulate: bool) -> Consume:
    """Return a function that sums `own` and the received parts into `out`; `accumulate` adds the sum to `out`."""

    def add(cut: slice, theirs: list[Tensor]) -> None:
        if accumulate:
            out[cut] += _sum(axis, own[cut], theirs, out=own[cut])
        else:
            _sum(axis, own[cut], theirs, out=out[cut])

    return add


def _gather(axis: Axis, tag: int, parts: Sequence[Tensor]) -> Exchange:
    """Return the exchange of an all-gather, not started; `parts` are flat."""
    return swap(axis, tag, [parts[axis.rank]], parts)


def _exchanged(axis: Axis, purpose: str, exchange: Exchange, result: Tensor) -> Pending:
    def finish() -> Tensor:
        exchange.wait()
        return result

    return Pending(axis, purpose, finish, exchange.unread)


def _own(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's part of the first dim (of `size` equal parts) as a view; `chunk` would make `size` views."""
    return x[_own_elements(x, axis)]


def _own_elements(x: Tensor, axis: Axis) -> slice:
    """Return the slice of the first dim that is this rank's part (of `size` equal parts)."""
    length = len(x) // axis.size
    return slice(axis.rank * length, (axis.rank + 1) * length)


def _landing(on_host: Pending, staging: HostStaging, into: Tensor | None = None, first: int = 0) -> Pending:
    """Return `on_host`, ended by a copy of its result, from element `first` on, to device tensor `into`, if any."""

    def land() -> Tensor:
        staging.end(into, first)
        return staging.host if into is None else into

    return on_host.then(land)


def nccl_pending(axis: Axis, purpose: str, work: dist.Work | None, result: Callable[[], Tensor]) -> Pending:
    """Return an operation that NCCL has started; `result` is called once the stream waits for it."""
    assert work is not None, "this process is not on the axis"

    def finish() -> Tensor:
        try:
            work.wait()  # makes the stream wait, not the host
        except RuntimeError as error:
            raise CollectiveError(axis.name, str(error)) from None
        return result()

    return Pending(axis, purpose, finish)


def _sum(axis: Axis, own: Tensor, received: Sequence[Tensor], out: Tensor) -> Tensor:
    """Add the parts in rank order, on every rank; write only to `out`, which may be `own`."""
    parts = {axis.rank: own} | dict(zip(others(axis), received, strict=True))
    in_place = same_place(out, own)
    wait_for_own = in_place and axis.rank > 1  # `out` holds `own`, which must be added before `out` is overwritten
    total = torch.add(parts[0], parts[1], out=None if wait_for_own else out)
    for k in range(2, axis.size):
        total = torch.add(total, parts[k], out=out if k == axis.rank or not wait_for_own else total)
        wait_for_own = wait_for_own and k != axis.rank
    return total
