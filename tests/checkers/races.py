"""Find accesses to memory that no wait orders: what happens before what, over the streams of a pretended GPU.

Each stream, the host's thread and the thread of its updates has a clock (a vector clock: Lamport 1978; Fidge 1988,
Mattern 1989). What the host queues is behind all that the host has done; a wait takes over the other's clock. Two
accesses to the same bytes, one of which writes, have to be ordered. Memory that is freed goes back to the stream in
which it was allocated: what other streams do with it has to be before what that stream does next, or it is kept for
them (`SideStream.keep`).

Operations are read as torch dispatches them: what an operation reads and writes is in its schema, and of a tensor it is
the bytes between its first and its last element. Everything large here is a view of a flat buffer, so that is exact.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.optim import delayed
from megazero.optim.mixture import Mixture
from megazero.zero.unit import Unit
from tests.checkers.trace import Await, Operation, Point, Trace

HOST, UPDATES = "host", "thread of updates"  # which are no streams: what they do is done at once

Clock = dict[str, int]  # of each stream, how much of it is done


class Access(NamedTuple):
    """An access of a stream: behind so many of its items."""

    stream: str
    number: int
    text: str


@dataclass
class _Piece:
    """Bytes [start, stop) of a storage, all of which were accessed alike since the last write."""

    start: int
    stop: int
    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)  # the last of each stream

    def cut(self, at: int) -> "_Piece":
        """Shorten the piece to end before `at`, and return the rest."""
        rest = _Piece(at, self.stop, self.write, dict(self.reads))
        self.stop = at
        return rest


class _Memory:
    """One storage.

    Attributes:
        owner: the stream in which it was allocated.
        kept: streams that it is kept for, up to which of their items.
        foreign: accesses of other streams that the owner is not known to be behind.
    """

    def __init__(self, x: Tensor, owner: str):
        self.alive = StorageWeakRef(x.untyped_storage())
        self.owner, self.kept = owner, dict[str, int]()
        self.foreign: dict[str, Access] = {}
        self._pieces: list[_Piece] = []

    def pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        """Yield pieces that make up exactly these bytes."""
        found, at = [], start
        for piece in self._pieces:
            if piece.stop <= start or piece.start >= stop:
                found.append(piece)
                continue
            if piece.start < start:
                head, piece = piece, piece.cut(start)
                found.append(head)
            rest = piece.cut(stop) if piece.stop > stop else None
            if at < piece.start:
                found.append(_Piece(at, piece.start))
            found.append(piece)
            at = piece.stop
            if rest is not None:
                found.append(rest)
        if at < stop:
            found.append(_Piece(at, stop))
        self._pieces = sorted(found, key=lambda piece: piece.start)
        return (piece for piece in self._pieces if start <= piece.start and piece.stop <= stop)


class Races(Trace):
    """A trace that knows what is ordered, and notes accesses that are not.

    Attributes:
        found: in order, each pair of operations once.
    """

    def __init__(self, rank: int):
        super().__init__(rank)
        self.found: list[str] = []
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._at: dict[Point, Clock] = {}
        self._memory: dict[int, _Memory] = {}  # by storage
        self._foreign: set[int] = set()
        self._muted = False

    def queue(self, stream: str, item: Operation | Await | str) -> Point:
        point = super().queue(stream, item)
        clock = self._clocks.setdefault(stream, {})
        if stream != UPDATES:
            _take_over(clock, self._clocks[HOST])
        if isinstance(item, Await):
            _take_over(clock, self._at.get(item.point, {}))
        clock[stream] = point[1]
        self._at[point] = dict(clock)
        return point

    def wait(self, text: str, *points: Point) -> None:
        super().wait(text, *points)
        for point in points:
            _take_over(self._clocks[HOST], self._at.get(point, {}))

    def keep(self, x: Tensor, stream: str) -> None:
        memory = self._of(x)
        memory.kept[stream] = self.end(stream)[1]

    def access(self, stream: str, text: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note what the last item of a stream reads and writes."""
        if self._muted:
            return
        self._look_for_freed()
        by = Access(stream, self.end(stream)[1], text)
        for x in reads:
            self._touch(x, by, writes=False)
        for x in writes:
            self._touch(x, by, writes=True)

    def watching(self, on_host: Callable[[Tensor], bool]) -> AbstractContextManager[object]:
        honest = Mixture.update

        def update(adam: Mixture, unit: Unit, **how: Any) -> None:
            here = self.current if self.current == UPDATES or not on_host(unit.masters) else HOST
            with self.use(here):  # counters and scalars beside the host's memory are its own too
                honest(adam, unit, **how)

        stack = ExitStack()
        stack.enter_context(patch.object(Mixture, "update", update))
        stack.enter_context(Accesses(self, on_host))
        return stack

    def threads(self) -> AbstractContextManager[object]:
        return patch.object(delayed, "ThreadPoolExecutor", lambda **_: InlineThread(self))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Be a context in which operations are none of the GPU's."""
        before, self._muted = self._muted, True
        yield
        self._muted = before

    @property
    def is_muted(self) -> bool:
        return self._muted

    def fork(self) -> None:
        """Let the thread of updates begin behind what the host has done."""
        _take_over(self._clocks.setdefault(UPDATES, {}), self._clocks[HOST])

    def join_thread(self) -> None:
        """Let the host wait for the thread of updates."""
        _take_over(self._clocks[HOST], self._clocks[UPDATES])

    def _of(self, x: Tensor) -> _Memory:
        key = x.untyped_storage()._cdata
        memory = self._memory.get(key)
        if memory is None or memory.alive.expired():
            memory = self._memory[key] = _Memory(x, self.current)
        return memory

    def _touch(self, x: Tensor, by: Access, *, writes: bool) -> None:
        if not x.numel():
            return
        memory, item = self._of(x), x.element_size()
        start = x.storage_offset() * item
        stop = start + (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))) * item
        for piece in memory.pieces(start, stop):
            if piece.write is not None:
                self._need(piece.write, by)
            if writes:
                for read in piece.reads.values():
                    self._need(read, by)
                piece.write, piece.reads = by, {}
            else:
                piece.reads[by.stream] = by
        if by.stream not in (memory.owner, HOST, UPDATES):  # those two only use memory of the host
            memory.foreign[by.stream] = by
            self._foreign.add(x.untyped_storage()._cdata)

    def _need(self, before: Access, by: Access) -> None:
        if before.stream != by.stream and self._clocks[by.stream].get(before.stream, 0) < before.number:
            self._add(f"{by.text} on {by.stream} is not behind {before.text} on {before.stream}")

    def _look_for_freed(self) -> None:
        """Find storages that were freed although another stream may still use them."""
        for key in list(self._foreign):
            memory = self._memory[key]
            owner = self._clocks.get(memory.owner, {})
            left = {
                stream: access
                for stream, access in memory.foreign.items()
                if max(owner.get(stream, 0), memory.kept.get(stream, 0)) < access.number
            }
            if left and memory.alive.expired():
                for access in left.values():
                    self._add(f"memory of {memory.owner} is freed before {access.text} on {access.stream} is done")
            memory.foreign = left
            if not left or memory.alive.expired():
                self._foreign.discard(key)

    def _add(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)


def _take_over(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


ALLOCATES = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}


class Accesses(TorchDispatchMode):
    """Operations as torch dispatches them: those of host memory alone are the host's, all others the stream's."""

    def __init__(self, races: Races, on_host: Callable[[Tensor], bool]):
        super().__init__()
        self._races, self._on_host = races, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema, races = kwargs or {}, func._schema, self._races
        if races.is_muted:
            return func(*args, **kwargs)
        reads, writes = [], []
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            tensors = [x for x in tree_leaves(given.get(argument.name)) if isinstance(x, Tensor)]
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors)
            if written and schema.name not in ("aten::copy_", "aten::zero_", "aten::fill_"):
                reads.extend(tensors)
        found = func(*args, **kwargs)
        shows = all(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if (shows and schema.returns) or schema.name in ALLOCATES:
            return found
        new = [x for x in tree_leaves(found) if isinstance(x, Tensor) and not any(x is other for other in writes)]
        every = [*reads, *writes] or new
        stream, there = races.current, [self._on_host(x) for x in every if x.numel()]
        if stream != UPDATES and there and all(there):
            stream = HOST
        races.queue(stream, schema.name)
        races.access(stream, schema.name, reads, [*writes, *new])
        return found


class InlineThread(Executor):
    """The thread of updates, whose work is done when it is submitted; only clocks know that it comes later."""

    def __init__(self, races: Races):
        self._races = races

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        races = self._races
        races.fork()
        future: Future[Any] = _Result(races)
        with races.use(UPDATES):
            future.set_result(fn(*arguments, **options))
        return future


class _Result(Future):
    def __init__(self, races: Races):
        super().__init__()
        self._races = races

    def result(self, timeout: float | None = None) -> Any:
        self._races.join_thread()
        return super().result(timeout)
