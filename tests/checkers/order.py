"""Compare what the ranks of a grid have queued, and let their hosts and GPUs go as far as they come.

    different(traces)   ranks that do not call the same operations in the same order on a communicator
    stuck(traces)       where hosts and streams stop for ever, for a model of NCCL and the driver:

- A host queues items in order. It waits at the first operation on a communicator until all its ranks have come there,
  and where the trace says that it waits for a stream.
- A stream takes its items one after the other. An operation ends when all ranks have begun it; so does a message, for
  both sides: a buffer that takes a small one is no guarantee.
- Streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). A queue begins its items in the order in which the host
  queued them: an item that may not begin yet holds back all behind it, of whatever stream.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from tests.checkers.trace import Await, HostWait, Name, Operation, Point, Queued, Trace

QUEUES = (1, 8, 32)


def different(traces: Sequence[Trace]) -> list[str]:
    """Return a line for each communicator whose ranks differ: where first, and in what."""
    calls: dict[Name, dict[int, list[tuple]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for operation in _operations(trace):
            calls[operation.communicator][trace.rank].append(_seen_by_all(operation, trace.rank))
    found = []
    for name, by_rank in sorted(calls.items()):
        first = by_rank[name[0][0]]
        for rank in name[0][1:]:
            own = by_rank[rank]
            if own != first:
                at = next((i for i, (a, b) in enumerate(zip(first, own, strict=False)) if a != b), None)
                at = min(len(first), len(own)) if at is None else at
                pair = [_text(which[at : at + 1]) for which in (first, own)]
                found.append(f"{name}, operation {at}: rank {name[0][0]} {pair[0]}, rank {rank} {pair[1]}")
    return found


def _text(operations: Sequence[tuple]) -> str:
    return " ".join(map(str, operations[0])) if operations else "has ended"


def _operations(trace: Trace) -> Iterator[Operation]:
    for event in trace.events:
        if isinstance(event, Queued) and isinstance(event.item, Operation):
            yield event.item


def _seen_by_all(operation: Operation, rank: int) -> tuple:
    """Return an operation in words that are the same for all its ranks."""
    what: tuple = (operation.dtype, operation.count, operation.about)
    if operation.peer is None:
        return operation.kind, *what
    peer = operation.communicator[0][operation.peer]
    ends = (rank, peer) if operation.kind == "send" else (peer, rank)
    return "message", *ends, *what


class _Gpu:
    """The streams of one rank, and the hardware queues that they share."""

    def __init__(self, queues: int):
        self._queues: list[deque[tuple[str, int, Operation | Await | str]]] = [deque() for _ in range(queues)]
        self._of: dict[str, int] = {}  # stream -> queue, dealt out as streams appear
        self._queued: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

    def put(self, event: Queued) -> None:
        queue = self._of.setdefault(event.stream, len(self._of) % len(self._queues))
        self._queues[queue].append((event.stream, self._queued[event.stream], event.item))
        self._queued[event.stream] += 1

    def passed(self, points: Sequence[Point]) -> bool:
        return all(self.done[stream] >= number for stream, number in points)

    def begin(self) -> Iterator[tuple[str, Operation | None]]:
        """Begin what may begin; yield the stream of each, and of an operation, which has not ended yet, what it is."""
        for queue in self._queues:
            while queue:
                stream, number, item = queue[0]
                if self.done[stream] < number or (isinstance(item, Await) and not self.passed([item.point])):
                    break
                queue.popleft()
                operation = item if isinstance(item, Operation) else None
                self.done[stream] += operation is None
                yield stream, operation

    def left(self) -> Iterator[str]:
        """Yield what each queue that has not ended stops at."""
        for queue in self._queues:
            if queue:
                stream, _, item = queue[0]
                yield f"{stream}: {item}"
        for stream, queued in self._queued.items():
            if self.done[stream] < queued:
                yield f"{stream} has done {self.done[stream]} of {queued}"


class _World:
    """The hosts and GPUs of all ranks."""

    def __init__(self, traces: Sequence[Trace], queues: int):
        self._traces = {trace.rank: trace.events for trace in traces}
        self._at = dict.fromkeys(self._traces, 0)
        self._gpus = {rank: _Gpu(queues) for rank in self._traces}
        self._come: dict[Name, set[int]] = defaultdict(set)  # hosts at their first use of a communicator
        self._begun: dict[tuple[Name, int], dict[int, str]] = defaultdict(dict)  # nth operation: rank -> stream
        self._count: Counter[tuple[Name, int]] = Counter()  # of the operations that a rank has begun
        self._moves = 0  # of hosts and GPUs

    def run(self) -> list[str]:
        moves = -1
        while moves != self._moves:
            moves = self._moves
            for rank, events in self._traces.items():
                while self._at[rank] < len(events) and self._passes(rank, events[self._at[rank]]):
                    self._at[rank] += 1
                    self._moves += 1
                self._go_on(rank)
        return list(self._left())

    def _passes(self, rank: int, event: Queued | HostWait) -> bool:
        """Let a host do one thing, unless it has to wait."""
        gpu = self._gpus[rank]
        if isinstance(event, HostWait):
            self._go_on(rank)
            return gpu.passed(event.points)
        if isinstance(event.item, Operation):
            name = event.item.communicator
            self._come[name].add(rank)
            if len(self._come[name]) < len(name[0]):
                return False
        gpu.put(event)
        return True

    def _go_on(self, rank: int) -> None:
        """Let a GPU go as far as it comes."""
        before = -1
        while before != self._moves:
            before = self._moves
            for stream, operation in self._gpus[rank].begin():
                self._moves += 1
                if operation is not None:
                    self._begin(rank, stream, operation.communicator)

    def _begin(self, rank: int, stream: str, name: Name) -> None:
        """Begin an operation on one rank; when all have begun it, it ends."""
        begun = self._begun[name, self._count[name, rank]]
        self._count[name, rank] += 1
        begun[rank] = stream
        if len(begun) == len(name[0]):
            for other, of_other in begun.items():
                self._gpus[other].done[of_other] += 1

    def _left(self) -> Iterator[str]:
        for rank, events in self._traces.items():
            if self._at[rank] < len(events):
                event = events[self._at[rank]]
                yield f"host {rank}: {event.text if isinstance(event, HostWait) else event.item}"
            for text in self._gpus[rank].left():
                yield f"GPU {rank}: {text}"


def stuck(traces: Sequence[Trace], queues: int) -> list[str]:
    """Return where hosts and GPUs stop for ever; nothing if all come to the end.

    Args:
        queues: the hardware queues of each GPU.
    """
    return _World(traces, queues).run()


def faults(traces: Sequence[Trace]) -> list[str]:
    """Return all that is wrong with the traces of a grid."""
    found = different(traces)
    for queues in QUEUES if not found else ():
        found += [f"{queues} queues: {text}" for text in stuck(traces, queues)]
    return found
