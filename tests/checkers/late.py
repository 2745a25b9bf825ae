"""Run a training step on pretended GPUs that do everything as late as its waits allow, or as early, with real values.

    trained = trained_on_gpus(job, shape, precision, late)

All ranks of a grid are threads of one process. What a rank queues on a stream or a communicator is kept (`Queueing`,
`machine.py`), and is done when the order says so, or when the host waits for it. Until then the memory that it writes
holds what was there before, or NaN. So whoever forgets a wait computes other numbers, in one order or another. Sums
are taken in rank order, so the bits have to be those of CPU ranks.

The host, too, does at once what it does: operations on its own memory, and which memory is whose. Its thread of updates
is a stream. What is queued keeps its tensors, so memory that torch frees too early is not seen.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megazero.comm.context import CommContext
from megazero.comm.grid import make_grid
from megazero.comm.pool import same_place
from megazero.model.transformer import Shape
from megazero.optim import delayed
from megazero.optim.mixture import Mixture
from megazero.plan.job import Job
from megazero.zero.engine import StepResult
from megazero.zero.placement import Precision
from megazero.zero.unit import Unit
from tests.checkers.machine import Item, Kind, Machine, Order
from tests.checkers.pretend import COMPUTE, Communicator, Name, PretendedStreams, Splits, stand_ins
from tests.checkers.races import ALLOCATES, UPDATES
from tests.checkers.sync import WAITS, SyncDetector
from tests.layouts import DELAYED_STEPS, Rank, Trained, planned, record

Result = TypeVar("Result")


class Gpu:
    """The streams and communicators of one rank.

    Args:
        on_host: whether a tensor is in memory of the host.
    """

    def __init__(self, machine: Machine, rank: int, world: int, on_host: Callable[[Tensor], bool]):
        self.machine, self.rank, self.on_host = machine, rank, on_host
        self.everyone = self.communicator((tuple(range(world)), 0))
        self.streams = PretendedStreams(self, lambda name: _Stream(self, name))
        self._last: dict[str, Item] = {}
        self._stack = [COMPUTE]

    @property
    def current(self) -> str:
        return self._stack[-1]

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        self._stack.append(stream)
        yield
        self._stack.pop()

    def keep(self, x: Tensor, stream: str) -> None:
        """Do nothing: what is queued keeps its tensors."""

    def last(self, stream: str) -> Item | None:
        """Return what is queued last on a stream, to which nothing is added any more; None: all of it is done."""
        item = self._last.get(stream)
        if item is None or item.done:
            return None
        item.closed = True
        return item

    def queue(
        self, stream: str, run: Callable[[], object] | None, follows: Item | None = None, kind: Kind | None = None
    ) -> Item:
        """Queue something on a stream, behind what is there and another item."""
        if kind is None:
            kind = Kind.COMPUTE if stream == COMPUTE else Kind.BESIDE
        before = self._last.get(stream)
        if before is not None and before.kind is kind and follows is None and not (before.closed or before.done):
            if run is not None:
                before.runs.append(run)
            return before
        item = self._last[stream] = Item(kind, run, [before, follows])
        self.machine.add(item)
        return item

    def order(self, stream: str, item: Item | None) -> None:
        """Let a stream wait for an item."""
        if item is not None and not item.done:
            self.queue(stream, None, item)

    def wait_for_all(self) -> None:
        for stream in list(self._last):
            self.machine.force(self.last(stream))

    def communicator(self, name: Name) -> Communicator:
        """Return a communicator. It has a stream of its own, as NCCL's have."""
        stream, place, number = f"communicator {name}", name[0].index(self.rank), 0

        def launch(kind: str, source: Tensor | None, into: Tensor | None, peer: int | None = None) -> dist.Work:
            nonlocal number
            meeting = self.machine.meeting(name, number, kind)
            number += 1
            into = None if into is None else into.data.view(-1)
            meeting.sources[place] = source = None if source is None else source.data
            others = [] if into is None else _written(kind, source, into, place, len(name[0]))

            def land() -> None:
                result = meeting.results[place]
                if into is None or result is None:
                    return
                if kind != "all_gather":
                    into.copy_(result)
                    return
                for k, part in others:
                    part.copy_(result.chunk(len(name[0]))[k])

            begin = self.queue(
                stream, lambda: _spoil(*(part for _, part in others)), self.last(self.current), Kind.BEGIN
            )
            self.machine.join(meeting, begin)
            return _Work(self, self.queue(stream, land, meeting.read))

        return Communicator(name, self.rank, launch)


def _written(kind: str, source: Tensor | None, into: Tensor, place: int, size: int) -> list[tuple[int, Tensor]]:
    """Return what an operation writes to and does not read, with its place among the ranks."""
    if source is None or source.untyped_storage()._cdata != into.untyped_storage()._cdata:
        return list(enumerate(into.chunk(size) if kind == "all_gather" else [into]))
    if kind != "all_gather":
        return []
    parts = into.chunk(size)
    assert same_place(source, parts[place]), "its own part is at its place"
    return [(k, part) for k, part in enumerate(parts) if k != place]


def _spoil(*tensors: Tensor) -> None:
    """Write NaN: what is there may be anything; of codes and their scales bytes that are NaN as scales."""
    for x in tensors:
        if x.is_floating_point() or x.dtype == torch.uint8:
            x.fill_(torch.nan if x.is_floating_point() else 255)


class _Stream:
    def __init__(self, gpu: Gpu, name: str):
        self._gpu, self.name = gpu, name

    def wait_stream(self, other: "_Stream") -> None:
        self._gpu.order(self.name, self._gpu.last(other.name))

    def synchronize(self) -> None:
        self._gpu.machine.force(self._gpu.last(self.name))


class _Work(dist.Work):
    def __init__(self, gpu: Gpu, item: Item):
        super().__init__()
        self._gpu, self._item = gpu, item

    def wait(self, *timeout: Any) -> bool:
        self._gpu.order(self._gpu.current, self._item)
        return True

    def is_completed(self) -> bool:
        return self._item.done


class _Mark:
    """A place in the current stream (`readback.Mark`)."""

    def __init__(self, gpu: Gpu):
        self._gpu, self._item = gpu, gpu.last(gpu.current)

    def query(self) -> bool:
        self._gpu.machine.force(self._item)
        return True


class _Updates(Executor):
    """The host's thread of updates."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        item = self._gpu.queue(UPDATES, lambda: fn(*arguments, **options))
        self._gpu.last(UPDATES)
        return _Update(self._gpu, item)


class _Update(Future):
    def __init__(self, gpu: Gpu, item: Item):
        super().__init__()
        self._gpu, self._item = gpu, item

    def result(self, timeout: float | None = None) -> Any:
        self._gpu.machine.force(self._item)


class Queueing(TorchDispatchMode):
    """Operations as torch dispatches them: views and memory are made at once, values when the order says so.

    Results are computed twice: at once, for their shapes, and later. What an operation reads and writes is the memory
    that its tensors have when it is queued.
    """

    def __init__(self, gpu: Gpu):
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema, gpu = kwargs or {}, func._schema, self._gpu
        tensors = list(_tensors((args, *kwargs.values())))
        if not tensors:  # made of numbers of Python
            found = func(*args, **kwargs)
            if schema.name in ALLOCATES:
                _spoil(found)
            return found
        if all(gpu.on_host(x) for x in tensors):
            return func(*args, **kwargs)
        if schema.name in WAITS:
            gpu.machine.force(gpu.last(gpu.current))
            return func(*args, **kwargs)
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [
            given[argument.name]
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
        ]
        later = _now(args), {name: _now(value) for name, value in kwargs.items()}
        if written:
            self._write(func, *later)
            return (None, written[0], tuple(written))[min(len(schema.returns), 2)]
        found = func(*args, **kwargs)
        made = list(_tensors(found))
        old = {x.untyped_storage()._cdata for x in tensors}
        if any(x.untyped_storage()._cdata in old for x in made):
            return found  # a view
        _spoil(*made)
        if schema.name not in ALLOCATES:
            self._compute(func, *later, [x.data for x in made])
        return found

    def _write(self, func: Any, args: Any, kwargs: Any) -> None:
        gpu = self._gpu
        blocks = False
        if func._schema.name == "aten::copy_":
            if gpu.current != COMPUTE:
                gpu.queue(gpu.current, lambda: _spoil(args[0]), kind=Kind.BEGIN)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            blocks = gpu.on_host(args[0]) != gpu.on_host(args[1]) and not non_blocking
        gpu.queue(gpu.current, lambda: func(*args, **kwargs))
        if blocks:
            gpu.machine.force(gpu.last(gpu.current))

    def _compute(self, func: Any, args: Any, kwargs: Any, into: Sequence[Tensor]) -> None:
        def compute() -> None:
            for x, value in zip(into, _tensors(func(*args, **kwargs)), strict=True):
                x.copy_(value)

        self._gpu.queue(self._gpu.current, compute)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _now(value: Any) -> Any:
    """Return arguments with tensors that stay in the memory where they are, whatever becomes of a parameter's data."""
    if isinstance(value, Tensor):
        return value.data
    return type(value)(map(_now, value)) if isinstance(value, list | tuple) else value


def _host_updates(on_host: Callable[[Tensor], bool]) -> Callable[..., None]:
    """Return `Mixture.update`, which the host does at once on its memory, counters and scalars included."""
    honest = Mixture.update

    def update(adam: Mixture, unit: Unit, **how: Any) -> None:
        with _disable_current_modes() if on_host(unit.masters) else nullcontext():
            honest(adam, unit, **how)

    return update


def on_gpus(world: int, order: Order, work: Callable[[CommContext, Gpu], Result]) -> list[Result]:
    """Return what `work` returns on each rank of a world."""
    machine, here, detector = Machine(world, order), threading.local(), SyncDetector()
    results, errors = dict[int, Any](), list[BaseException]()

    def be(rank: int) -> None:
        gpu = here.gpu = Gpu(machine, rank, world, detector.on_host)
        try:
            machine.turns.begin(rank)
            result = work(CommContext("nccl", split_group=Splits(rank, gpu.communicator)), gpu)
            gpu.wait_for_all()
            results[rank] = result
        except BaseException as error:
            errors.append(error)
        machine.turns.end(rank, failed=rank not in results)

    with (
        stand_ins(
            lambda: here.gpu.rank,
            lambda: here.gpu.everyone,
            lambda: here.gpu.streams,
            lambda device: here.gpu.wait_for_all(),
            lambda: _Mark(here.gpu),
        ) as patch,
        detector.watch_hosts(),
    ):
        patch.setattr(Mixture, "update", _host_updates(detector.on_host))
        patch.setattr(delayed, "ThreadPoolExecutor", lambda **_: _Updates(here.gpu))
        threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]


def trained_on_gpus(job: Job, shape: Shape, precision: Precision, order: Order) -> list[Trained]:
    """Return what each rank of a job computes in a few steps."""
    sizes = {"tensor": job.tensor, "pipeline": job.pipeline, "shard_ranks": job.neighbours}
    tied = planned(job, shape, precision).ties_ranks

    def train(comm: CommContext, gpu: Gpu) -> Trained:
        rank = Rank(make_grid(comm=comm, device_type="cpu", tied=tied, **sizes), job, shape, precision)
        feeds = [[rank.feed(step, m) for m in range(job.micro_batches)] for step in range(DELAYED_STEPS)]

        def one_step(rank: Rank, step: int) -> StepResult:
            rank.engine.begin_step()
            rank.pipeline.train(feeds[step], lambda feed: feed)
            return rank.engine.finish_step(lr=1e-3)

        with Queueing(gpu):
            return record(rank, one_step)

    return on_gpus(job.ranks, order, train)
