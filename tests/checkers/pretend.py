"""Stand-ins for what a GPU's run uses of torch: communicators, streams, marks, and a world of ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm import nccl, streams
from megazero.comm.fake_group import FakeProcessGroup
from megazero.comm.readback import Mark, Readback
from megazero.comm.streams import Streams
from megazero.comm.transport import nccl_channels

COMPUTE = "compute"  # the stream that is current in the beginning

Name = tuple[tuple[int, ...], int]  # of a communicator: its ranks; by which of the world's splits it was made


class Launch(Protocol):
    """What a communicator does with an operation: its kind, what it reads and writes, the other rank of a message."""

    def __call__(
        self, kind: str, source: Tensor | None, into: Tensor | None, peer: int | None = None, /
    ) -> dist.Work: ...


class PretendedGpu(Protocol):
    """A GPU that has streams, by their names."""

    @property
    def current(self) -> str: ...

    def use(self, stream: str, /) -> Any: ...

    def keep(self, x: Tensor, stream: str, /) -> None: ...


class PretendedStreams(Streams):
    """The streams of a pretended GPU (`streams.Streams`).

    Args:
        stream: gives the one of a name.
    """

    def __init__(self, gpu: PretendedGpu, stream: Callable[[str], Any]):
        self._gpu, self._stream, self._made = gpu, stream, 0

    def new(self, device: torch.device) -> Any:
        self._made += 1
        return self._stream(f"side {self._made}")

    def current(self) -> Any:
        return self._stream(self._gpu.current)

    def use(self, stream: Any) -> Any:
        return self._gpu.use(stream.name)

    def follow(self, behind: Any, ahead: Any) -> None:
        behind.wait_stream(ahead)

    def keep(self, x: Tensor, stream: Any) -> None:
        self._gpu.keep(x, stream.name)


class Communicator(FakeProcessGroup):
    """A communicator, all of whose operations go to one function.

    Args:
        rank: a global rank, one of those of the name.
    """

    def __init__(self, name: Name, rank: int, launch: Launch):
        super().__init__(name[0].index(rank), len(name[0]))
        self._launch = launch

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> dist.Work:
        return self._launch("all_reduce", tensors[0], tensors[0])

    def allgather(self, wholes: Sequence[Any], parts: Sequence[Tensor], *options: Any) -> dist.Work:
        return self._launch("all_gather", parts[0], None)

    def reduce_scatter(self, outs: Sequence[Tensor], parts: Sequence[Any], *options: Any) -> dist.Work:
        return self._launch("reduce_scatter", None, outs[0])

    def all_gather_single(self, whole: Tensor, part: Tensor, *options: Any) -> dist.Work:
        return self._launch("all_gather", part, whole)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, *options: Any) -> dist.Work:
        return self._launch("reduce_scatter", x, out)

    # Their names before torch 2.13.
    def all_to_all_single(self, out: Tensor, x: Tensor, *options: Any) -> dist.Work:
        return self._launch("all_to_all", x, out)

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def send(self, tensors: Sequence[Tensor], *target: Any) -> dist.Work:
        return self._launch("send", tensors[0], None, target[0])

    def recv(self, tensors: Sequence[Tensor], *source: Any) -> dist.Work:
        return self._launch("receive", None, tensors[0], source[0])


class Splits:
    """The communicators of one rank (`CommContext.split_group`).

    Args:
        make: makes the communicator of a name.
    """

    def __init__(self, rank: int, make: Callable[[Name], Communicator]):
        self._rank, self._make, self._made = rank, make, 0

    def __call__(self, *, split_ranks: Sequence[Sequence[int]], **options: Any) -> dist.ProcessGroup | None:
        self._made += 1
        own = next((tuple(ranks) for ranks in split_ranks if self._rank in ranks), None)
        return None if own is None else self._make((own, self._made))


@contextmanager
def stand_ins(
    rank: Callable[[], int],
    everyone: Callable[[], Communicator],
    streams_of: Callable[[], Streams],
    synchronize: Callable[[torch.device], object],
    mark: Callable[[], Mark],
) -> Iterator[pytest.MonkeyPatch]:
    """Let the code of a run see pretended GPUs: each function is called when it looks, in its thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", rank)
        patch.setattr(dist, "get_world_size", lambda: everyone().size())
        patch.setattr(type(dist.group), "WORLD", property(lambda _: everyone()))
        patch.setattr(streams, "streams_of", lambda device: streams_of())
        patch.setattr(nccl, "synchronize", synchronize)
        patch.setattr(nccl_channels, "synchronize", synchronize)
        patch.setitem(Readback.__init__.__kwdefaults__, "marked", lambda device: mark())
        yield patch
