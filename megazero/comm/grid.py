"""Lay out the ranks on a grid, an ordered mapping of axes: pipeline, replica, shard, tensor, the tensor axis fastest.

    rank = ((pipeline rank x replicas + replica rank) x shards + shard rank) x tensor size + tensor rank

so that the ranks that communicate most, those of one tensor axis, are neighbours on one host, followed by those over
which ZeRO shards. A new axis is one row of `AXES` (`axes.py`): its place in the rank order, and the sums that are
partial along it. A layer, a unit or a loader receives the axes it uses, never the whole grid. An axis of size 1 is the
identity: the same code runs, and every region, reduction and slice along it returns its input.

An *axis* is a direction of the grid, a *dim* is one of a tensor. A *joined* axis combines neighbouring rows of `AXES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from megazero.comm.axes import AXES, JOINED
from megazero.comm.context import CommContext
from megazero.comm.nccl import connect
from megazero.comm.sizes import shards_and_replicas


@dataclass(frozen=True, eq=False)
class Axis:
    """One direction of the grid as one rank sees it.

    Attributes:
        name: a row of `AXES`, a joined axis, or "ends"; "data" for the shard axis if that is the whole data axis.
        size: the number of ranks along it.
        rank: this rank's index on the axis, 0 <= rank < size.
        first, stride: the global ranks along it are first, first + stride, ...
        group: the process group of these ranks; None if nothing is ever sent (one rank, a model on meta).
        comm: the communication context of this rank, shared by all its axes.
    """

    name: str
    size: int = 1
    rank: int = 0
    first: int = 0
    stride: int = 1
    group: dist.ProcessGroup | None = None
    comm: CommContext = field(default_factory=CommContext)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"{self.name}: rank {self.rank} outside an axis of {self.size}"

    def shard(self, total: int) -> int:
        """Return the number of rows that each rank holds of `total`, rounded up: the last ranks may hold padding."""
        return -(-total // self.size)

    @property
    def ranks(self) -> range:
        """Return the global ranks along the axis."""
        return range(self.first, self.first + self.size * self.stride, self.stride)


class Grid(dict[str, Axis]):
    """The axes of one rank by name: the rows of `AXES`, the joined ones, and "ends", the two ends of a pipeline.

    If all data ranks are one shard group, "shard" and "data" are the same axis, and its name is "data".
    """

    @property
    def comm(self) -> CommContext:
        """Return the communication context of this rank."""
        return self["world"].comm

    def partial(self, what: str) -> list[Axis]:
        """Return the axes along which the sum `what` ("gradients" or "loss") is partial: each rank has a summand.

        Axes whose ranks see different samples come first, the fastest of them first. Sums are taken in this order,
        which affects the last bits of the results.
        """
        names = [name for name in reversed(AXES) if what in AXES[name]]
        names.sort(key=lambda name: "gradients" not in AXES[name])
        for joined, parts in JOINED.items():  # one sum instead of several
            if names[: len(parts)] == list(reversed(parts)):
                names[: len(parts)] = [joined]
        return [self[name] for name in names]

    def counts(self, what: str) -> bool:
        """Return whether this rank's summand counts in the sum `what` over the world: of equal ones only one does.

        Summands are equal along the axes that `partial(what)` does not return.
        """
        return all(self[name].rank == 0 for name, partial in AXES.items() if what not in partial)

    def with_comm(self, comm: CommContext) -> "Grid":
        """Return the same grid with another communication context."""
        return self._changed(lambda axis: replace(axis, comm=comm))

    def with_groups(self, groups: Mapping[str, dist.ProcessGroup | None]) -> "Grid":
        """Return the same grid with process groups, given by axis name, on the axes that have more than one rank."""
        return self._changed(lambda axis: replace(axis, group=groups[axis.name]) if axis.size > 1 else axis)

    def _changed(self, change: Callable[[Axis], Axis]) -> "Grid":
        changed = {axis: change(axis) for axis in dict.fromkeys(self.values())}
        return Grid({name: changed[axis] for name, axis in self.items()})


def single(comm: CommContext | None = None) -> Grid:
    """Return the grid of a run of one process."""
    return lay_out(0, 1, comm=comm or CommContext())


def lay_out(
    rank: int,
    world: int,
    *,
    comm: CommContext,
    tensor: int = 1,
    pipeline: int = 1,
    shard_ranks: int | None = None,
    tied: bool = True,
) -> Grid:
    """Return the axes of a rank, without process groups.

    Args:
        shard_ranks: neighbouring data ranks over which ZeRO shards; None: all.
        tied: the first and the last rank of a pipeline share a weight; if not, the "ends" axis has one rank.

    Raises:
        UserError: 106, see `shards_and_replicas`.
    """
    shard, replicas = shards_and_replicas(world, tensor, pipeline, shard_ranks)
    sizes = {"pipeline": pipeline, "replica": replicas, "shard": shard, "tensor": tensor}
    axes, stride = {}, world
    for name in AXES:
        size = sizes[name]
        stride //= size
        place = rank // stride % size
        axes[name] = Axis(name, size, place, rank - place * stride, stride, comm=comm)
    for name, parts in JOINED.items():
        axes[name] = _join(name, [axes[part] for part in parts])
    if replicas == 1:
        axes["shard"] = axes["data"]
    axes["ends"] = _ends(axes["pipeline"]) if tied else Axis("ends", comm=comm)
    return Grid(axes)


def _join(name: str, parts: list[Axis]) -> Axis:
    """Join neighbouring axes, given slowest first, into one axis."""
    size, rank, last = 1, 0, parts[-1]
    for part in parts:
        size, rank = size * part.size, rank * part.size + part.rank
    return Axis(name, size, rank, last.ranks[last.rank] - rank * last.stride, last.stride, comm=last.comm)


def make_grid(
    *,
    comm: CommContext,
    device_type: str,
    tensor: int = 1,
    pipeline: int = 1,
    shard_ranks: int | None = None,
    tied: bool = True,
) -> Grid:
    """Make the grid over the default process group. Every rank calls it.

    On NCCL each axis with several ranks has a communicator of its own, which is connected here. So has a data axis that
    is the whole world, so that sums over the world are not queued after the gathers of the data axis.

    Args:
        device_type: the device type of the tensors that are sent along the axes.
        tied: see `lay_out`.

    Raises:
        UserError: 106, see `shards_and_replicas`.
        CollectiveError: a rank did not join while the groups were made.
    """
    sizes = {"tensor": tensor, "pipeline": pipeline, "shard_ranks": shard_ranks}
    world = dist.get_world_size()
    grid = lay_out(dist.get_rank(), world, comm=comm, tied=tied, **sizes)
    with comm.together("axes"):
        groups: dict[str, dist.ProcessGroup | None] = {"world": dist.group.WORLD}
        for axis in (grid[name] for name in ("pipeline", "data", "replica", "shard", "tensor")):
            if axis.size > 1 and axis.name not in groups:
                groups[axis.name] = _group_of(comm, axis.name, lines(axis, world), few_ctas=axis.name == "pipeline")
        if tied and pipeline == 2 and comm.backend == "gloo":  # tags keep its messages apart
            groups["ends"] = groups["pipeline"]
        elif tied and pipeline > 1:
            ends = [[ranks[0], ranks[-1]] for ranks in lines(grid["pipeline"], world)]
            groups["ends"] = _group_of(comm, "ends", ends)
        if comm.backend == "nccl":
            for name, group in groups.items():
                if group is not None:  # None: this rank is between the ends
                    connect(group, torch.device(device_type), partial(comm.calling, name, name, grid[name].ranks))
    return grid.with_groups(groups)


def _group_of(
    comm: CommContext, name: str, groups: list[list[int]], *, few_ctas: bool = False
) -> dist.ProcessGroup | None:
    """Make a group for each of these lists of ranks, and return this rank's. Every rank of the world calls it.

    torch's device mesh would split NCCL's communicators too, but also make one of a single rank for an axis of size 1.

    Args:
        name, few_ctas: see `nccl.split_group`.
    """
    if comm.backend == "nccl":
        return comm.split(name, groups, dist.get_world_size(), few_ctas=few_ctas)
    own = None
    for ranks in groups:
        made = dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(ranks, timeout=comm.timeout)
        if dist.get_rank() in ranks:
            assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
            own = made
    return own


def lines(axis: Axis, world: int) -> list[list[int]]:
    """Return every group of ranks of the world that differ only along an axis, as lists of global ranks."""
    block = axis.size * axis.stride
    firsts = (first + place for first in range(0, world, block) for place in range(axis.stride))
    return [list(range(first, first + block, axis.stride)) for first in firsts]


def _ends(pipeline: Axis) -> Axis:
    """Return the axis of the first and the last rank of a pipeline; an axis of size 1 for the ranks between them."""
    last = pipeline.size - 1
    if last == 0 or pipeline.rank not in (0, last):
        return Axis("ends", comm=pipeline.comm)
    ranks = [pipeline.ranks[0], pipeline.ranks[last]]
    return Axis("ends", 2, int(pipeline.rank == last), ranks[0], ranks[1] - ranks[0], comm=pipeline.comm)
