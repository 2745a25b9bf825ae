"""The grid of ranks: pipeline x data x tensor, the tensor axis fastest.

    rank = (pipeline rank x data size + data rank) x tensor size + tensor rank

so that the ranks that talk most, those of one tensor axis, are neighbours on one host. A layer, a unit or a loader
receives the axes it uses, never the whole grid. An axis of size 1 is the identity: the same code runs, and every
region, reduction and slice along it leaves what it gets as it is.

Words: an *axis* is a direction of the grid, a *dim* one of a tensor.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megazero.comm.context import CommContext
from megazero.comm.lobby import together
from megazero.comm.sizes import data_size


@dataclass(frozen=True, eq=False)
class Axis:
    """One direction of the grid as one rank sees it.

    Attributes:
        name: "tensor", "pipeline", "data", "world" or "ends".
        size: how many ranks lie along it.
        rank: this rank's place, 0 <= rank < size.
        first, stride: the global ranks along it are first, first + stride, ...
        group: the process group of these ranks; None where nothing is ever sent (one rank, a model on meta).
        wire: how this rank talks; shared by all its axes.
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
        """How many of `total` rows one rank holds; the last ranks' rows may be padding (`total` rounded up)."""
        return -(-total // self.size)

    @property
    def ranks(self) -> range:
        """The global ranks along the axis."""
        return range(self.first, self.first + self.size * self.stride, self.stride)


@dataclass(frozen=True)
class Grid:
    """All axes of one rank; `world` runs through every rank, `ends` from the first to the last of a pipeline."""

    tensor: Axis
    data: Axis
    pipeline: Axis
    world: Axis
    embedding_group: Axis


def single(comm: CommContext | None = None) -> Grid:
    """The grid of a run of one process."""
    comm = comm or CommContext()
    return Grid(*(Axis(name, comm=comm) for name in ("tensor", "data", "pipeline", "world", "ends")))


def lay_out(rank: int, world: int, *, tensor: int, pipeline: int, comm: CommContext) -> Grid:
    """Where a rank stands on every axis; nobody can be reached along them yet.

    Raises:
        UserError: 106, see `data_size`.
    """
    sizes = {"pipeline": pipeline, "data": data_size(world, tensor, pipeline), "tensor": tensor}
    axes, stride = {"world": Axis("world", world, rank, comm=comm)}, world
    for name, size in sizes.items():
        stride //= size
        place = rank // stride % size
        axes[name] = Axis(name, size, place, rank - place * stride, stride, comm=comm)
    return Grid(**axes, embedding_group=_ends(axes["pipeline"]))


def joined(grid: Grid, groups: Mapping[str, dist.ProcessGroup | None]) -> Grid:
    """The same with the process group of each axis that has more than one rank, by its name."""
    axes = (getattr(grid, field.name) for field in fields(grid))
    return Grid(*(replace(axis, group=groups[axis.name]) if axis.size > 1 else axis for axis in axes))


def make_grid(*, tensor: int, pipeline: int, comm: CommContext, device_type: str) -> Grid:
    """The grid over the default process group. Every rank calls it.

    Raises:
        UserError: 106, see `data_size`; 311, a rank did not come while the groups were made.
    """
    grid = lay_out(dist.get_rank(), dist.get_world_size(), tensor=tensor, pipeline=pipeline, comm=comm)
    with together(comm.lobby, "axes"):
        groups = _groups_of_gloo(grid) if comm.backend == "gloo" else _groups_of_mesh(grid, device_type)
        groups |= {"world": dist.group.WORLD, "ends": _group_of_ends(grid.pipeline, groups["pipeline"])}
    return joined(grid, groups)


def _groups_of_gloo(grid: Grid) -> dict[str, dist.ProcessGroup | None]:
    """Return the group of each axis. torch's mesh would give ranks half an hour to come."""
    world, groups = torch.arange(grid.world.size), {}
    for axis in (grid.pipeline, grid.data, grid.tensor):
        groups[axis.name] = None
        lines = world.view(-1, axis.size, axis.stride).transpose(1, 2).reshape(-1, axis.size)
        for ranks in lines.tolist() if axis.size > 1 else []:
            made = dist.new_group(ranks, timeout=axis.comm.timeout) if axis.size < len(world) else dist.group.WORLD
            if ranks == list(axis.ranks):
                groups[axis.name] = made
    return groups


def _groups_of_mesh(grid: Grid, device_type: str) -> dict[str, dist.ProcessGroup | None]:
    """Return the group of each axis from torch's device mesh, which splits NCCL's communicators."""
    axes = {axis.name: axis for axis in (grid.pipeline, grid.data, grid.tensor)}
    with warnings.catch_warnings():  # torch notes on CPU-only builds that groups of one rank are not needed
        warnings.simplefilter("ignore", UserWarning)
        sizes = tuple(axis.size for axis in axes.values())
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(axes))
    groups = {name: mesh.get_group(name) if axis.size > 1 else None for name, axis in axes.items()}
    for name, group in groups.items():
        if group is not None:
            _set_pg_timeout(axes[name].comm.timeout, group)  # the mesh gives its groups the backend's default
    return groups


def parallel_axes(pipeline: Axis) -> list[range]:
    """The ranks of every pipeline of the world, which differ in their data and tensor ranks."""
    return [range(first, first + pipeline.size * pipeline.stride, pipeline.stride) for first in range(pipeline.stride)]


def _ends(pipeline: Axis) -> Axis:
    """The first and the last rank of a pipeline; for those between, nobody."""
    last = pipeline.size - 1
    if last == 0 or pipeline.rank not in (0, last):
        return Axis("ends", comm=pipeline.comm)
    ranks = [pipeline.ranks[0], pipeline.ranks[last]]
    return Axis("ends", 2, int(pipeline.rank == last), ranks[0], ranks[1] - ranks[0], comm=pipeline.comm)


def _group_of_ends(pipeline: Axis, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """That of the first and the last rank of a pipeline of `group`. Every rank of the world calls it."""
    last = pipeline.size - 1
    if last > 1:
        for ranks in parallel_axes(pipeline):
            made = dist.new_group([ranks[0], ranks[last]], timeout=pipeline.comm.timeout)
            if ranks.start == pipeline.first and pipeline.rank in (0, last):
                assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
                group = made
    return group
