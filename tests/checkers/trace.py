"""Record what one rank of a grid queues on a GPU in some steps, on a CPU and without any other rank.

The code of a run trains on communicators of a pretended world (`CommContext` on NCCL), every operation of which
completes at once. The trace is what its host did, in order: what it queued on which stream, and where it waited.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.context import CommContext
from megazero.comm.grid import make_grid
from megazero.comm.status_board import StatusBoard, StatusSlot
from megazero.model.transformer import Shape
from megazero.pipeline.transport import Transport
from megazero.plan.job import Job
from megazero.schedules.actions import Action, Kind
from megazero.train.trainer import Trainer
from megazero.zero.placement import Precision
from tests.checkers.pretend import COMPUTE, Communicator, Name, PretendedStreams, Splits, stand_ins
from tests.checkers.sync import SyncDetector, Wait
from tests.checkers.training import STEPS, trainer_of
from tests.layouts import Rank, planned

FP32 = Precision()
Point = tuple[str, int]  # of a stream: behind so many of its items


@dataclass(frozen=True)
class Operation:
    """An operation on a communicator, as one rank calls it.

    Attributes:
        about: its content: purpose and shape, or whose message it is; NCCL does not know it.
        peer: the other rank of a message, among those of the communicator; None of a collective.
    """

    communicator: Name
    kind: str
    dtype: torch.dtype
    count: int
    about: str
    peer: int | None = None


@dataclass(frozen=True)
class Await:
    """An item of a stream that holds it until another stream has come to a point."""

    point: Point


@dataclass(frozen=True)
class Queued:
    """The host has queued an item on a stream; a text is a computation."""

    stream: str
    item: Operation | Await | str


@dataclass(frozen=True)
class HostWait:
    """The host waits until streams have come to points."""

    points: tuple[Point, ...]
    text: str


@dataclass
class Trace:
    """What the host of one rank did, in order.

    Attributes:
        before: events of the start, before the first step.
        about: the next operation.
    """

    rank: int
    events: list[Queued | HostWait] = field(default_factory=list)
    before: int = 0
    about: str = ""

    def __post_init__(self) -> None:
        self._queued: Counter[str] = Counter()
        self._stack = [COMPUTE]
        self._thread = threading.get_ident()

    @property
    def current(self) -> str:
        return self._stack[-1]

    def end(self, stream: str) -> Point:
        """Return the present end of a stream."""
        return stream, self._queued[stream]

    def queue(self, stream: str, item: Operation | Await | str) -> Point:
        assert threading.get_ident() == self._thread, "one thread queues"
        self._queued[stream] += 1
        self.events.append(Queued(stream, item))
        return self.end(stream)

    def order(self, stream: str, point: Point) -> None:
        """Hold a stream until another has come to a point."""
        if point[0] != stream and point[1]:
            self.queue(stream, Await(point))

    def wait(self, text: str, *points: Point) -> None:
        self.events.append(HostWait(tuple(point for point in points if point[1]), text))

    def wait_for_all(self, device: torch.device) -> None:
        self.wait("synchronize", *(self.end(stream) for stream in self._queued))

    def access(self, stream: str, text: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Learn what the last item of a stream reads and writes."""

    def keep(self, x: Tensor, stream: str) -> None:
        """Learn that memory is kept until a stream has done what is queued on it now."""

    def watching(self, on_host: Callable[[Tensor], bool]) -> AbstractContextManager[object]:
        """Return a context in which the trace sees more than what is queued.

        Args:
            on_host: whether a tensor is in memory of the host.
        """
        return nullcontext()

    def threads(self) -> AbstractContextManager[object]:
        """Return a context in which threads of the host are made."""
        return nullcontext()

    def muted(self) -> AbstractContextManager[None]:
        """Return a context in which operations are none of the GPU's."""
        return nullcontext()

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        self._stack.append(stream)
        yield
        self._stack.pop()


class _Stream:
    def __init__(self, trace: Trace, name: str):
        self.trace, self.name = trace, name

    def wait_stream(self, other: "_Stream") -> None:
        self.trace.order(self.name, self.trace.end(other.name))

    def synchronize(self) -> None:
        self.trace.wait(f"for {self.name}", self.trace.end(self.name))


class _Mark:
    """A place in the current stream (`readback.Mark`)."""

    def __init__(self, trace: Trace):
        self._trace, self._point = trace, trace.end(trace.current)

    def query(self) -> bool:
        self._trace.wait("readback", self._point)
        return True


class _Work(dist.Work):
    """An operation under way. It keeps its tensors until it is waited for, as NCCL's does."""

    def __init__(self, trace: Trace, point: Point, tensors: Sequence[Tensor]):
        super().__init__()
        self._trace, self._point, self._tensors = trace, point, tensors

    def wait(self, *timeout: Any) -> bool:
        self._trace.order(self._trace.current, self._point)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return False  # as late as possible


def _communicator(trace: Trace, name: Name) -> Communicator:
    """Return a communicator that writes the trace. It has a stream of its own, as NCCL's have."""

    def launch(kind: str, source: Tensor | None, into: Tensor | None, peer: int | None = None) -> dist.Work:
        """Queue an operation, and put anything where it writes.

        Sums are 0: a step without a valid token ends, whatever else the numbers are.
        """
        stream = f"communicator {name}"
        x = source if source is not None and kind != "reduce_scatter" else into
        assert x is not None, "it reads or writes"
        with trace.muted():
            if into is not None:
                into.zero_() if kind != "all_gather" else into.view(len(name[0]), -1).copy_(x.reshape(-1).clone())
        trace.order(stream, trace.end(trace.current))
        operation = Operation(name, kind, x.dtype, x.numel(), trace.about, peer)
        trace.about = ""
        point = trace.queue(stream, operation)
        reads, writes = ([y] if y is not None else [] for y in (source, into))
        trace.access(stream, kind, reads, writes)
        return _Work(trace, point, [*reads, *writes])

    return Communicator(name, trace.rank, launch)


class _StatusSlot(StatusSlot):
    """Learns what the next operation is about."""

    def __init__(self, trace: Trace):
        super().__init__(StatusBoard(), 0)
        self._trace = trace

    def begin(self, axis: str, ranks: range, text: str) -> int:
        self._trace.about = text
        return super().begin(axis, ranks, text)


def _told(trace: Trace, honest: Callable[..., None]) -> Callable[..., None]:
    """Return a method of `Transport` that tells first whose message it moves."""

    def method(transport: Transport, action: Action, *shape: Any) -> None:
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        trace.about = f"{'activations' if forward else 'gradients'} of micro-batch {action.micro_batch}"
        honest(transport, action, *shape)

    return method


class _Waits(SyncDetector):
    """Where the host would wait for all that is queued on the current stream, but in the named places."""

    def __init__(self, trace: Trace):
        super().__init__()
        self._trace = trace

    def report(self, wait: Wait) -> None:
        self._trace.wait(f"{wait.operation} in {wait.place}", self._trace.end(self._trace.current))


@contextmanager
def pretended(trace: Trace, world: int) -> Iterator[CommContext]:
    """Be a rank of a world of GPUs: its streams, communicators and marks write the trace."""
    everyone = _communicator(trace, (tuple(range(world)), 0))
    splits = Splits(trace.rank, lambda name: _communicator(trace, name))
    pretended_streams = PretendedStreams(trace, lambda name: _Stream(trace, name))
    with stand_ins(
        lambda: trace.rank, lambda: everyone, lambda: pretended_streams, trace.wait_for_all, lambda: _Mark(trace)
    ) as patch:
        for name in ("send", "post"):
            patch.setattr(Transport, name, _told(trace, getattr(Transport, name)))
        yield CommContext("nccl", split_group=splits, status_slot=_StatusSlot(trace))


def record(
    job: Job, rank: int, shape: Shape, precision: Precision = FP32, *, watched: bool = False, trace: Trace | None = None
) -> Trace:
    """Return what one rank of a job queues from its start to the end of two steps.

    Args:
        watched: the host waits where it would wait by torch's own operations (`sync.py`), which takes time to find.
        trace: to write; None: a new one.
    """
    trace = trace or Trace(rank)
    detector = _Waits(trace)
    tied = planned(job, shape, precision).ties_ranks
    sizes = {"tensor": job.tensor, "pipeline": job.pipeline, "shard_ranks": job.neighbours}
    with ExitStack() as stack:
        comm = stack.enter_context(pretended(trace, job.ranks))
        stack.enter_context(detector.watch_hosts())
        stack.enter_context(trace.threads())
        grid = make_grid(comm=comm, device_type="cpu", tied=tied, **sizes)
        one = Rank(grid, job, shape, precision)
        trainer: Trainer = trainer_of(one, lambda step, text: trace.queue(trace.current, f"{text} of step {step}"))
        trace.before = len(trace.events)
        stack.enter_context(trace.watching(detector.on_host))
        if watched:
            stack.enter_context(detector)
        for step in range(STEPS):
            trainer.train_step(step)
        one.engine.flush_delayed()
        trace.wait_for_all(torch.device("cpu"))
    return trace


def record_all(job: Job, shape: Shape, *, watched: bool = False) -> list[Trace]:
    """Return the traces of all ranks of a job."""
    return [record(job, rank, shape, watched=watched) for rank in range(job.ranks)]
