"""The grid of ranks: pipeline x data x tensor, the tensor axis fastest.

    rank = (pipeline rank x data size + data rank) x tensor size + tensor rank

so that the ranks that talk most, those of one tensor axis, are neighbours on one host. A layer, a unit or a loader
receives the axes it uses, never the whole grid. An axis of size 1 is the identity: the same code runs, and every
region, reduction and slice along it leaves what it gets as it is.

Words: an *axis* is a direction of the grid, a *dim* one of a tensor.
"""

import warnings
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megazero.errors import UserError
from megazero.parallel.wire import Wire


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
    wire: Wire = field(default_factory=Wire)

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
    ends: Axis


def data_size(world: int, tensor: int, pipeline: int) -> int:
    """What remains of the world for the data axis.

    Raises:
        UserError: 106, nothing whole remains.
    """
    if world % (tensor * pipeline):
        what = "expected world % (parallel.tensor * parallel.pipeline) == 0, "
        what += f"got {world} % ({tensor} * {pipeline}) = {world % (tensor * pipeline)}"
        raise UserError(106, what, "start another number of ranks, or change parallel.tensor or parallel.pipeline")
    return world // (tensor * pipeline)


def single(wire: Wire | None = None) -> Grid:
    """The grid of a run of one process."""
    wire = wire or Wire()
    return Grid(*(Axis(name, wire=wire) for name in ("tensor", "data", "pipeline", "world", "ends")))


def make_grid(*, tensor: int, pipeline: int, wire: Wire, device_type: str) -> Grid:
    """The grid over the default process group, on torch's device mesh. Every rank calls it.

    Raises:
        UserError: 106, see `data_size`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = (pipeline, data_size(world, tensor, pipeline), tensor)
    with warnings.catch_warnings():  # torch notes on CPU-only builds that groups of one rank are not needed
        warnings.simplefilter("ignore", UserWarning)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "data", "tensor"))
    strides = {"pipeline": sizes[1] * sizes[2], "data": sizes[2], "tensor": 1}
    axes = {}
    for name, size in zip(strides, sizes, strict=True):
        place = rank // strides[name] % size
        group = mesh.get_group(name) if size > 1 else None
        if group is not None:
            _set_pg_timeout(wire.timeout, group)  # the mesh gives its groups the backend's default, 10 minutes or more
        axes[name] = Axis(name, size, place, rank - place * strides[name], strides[name], group, wire)
    world_group = dist.group.WORLD if world > 1 else None
    whole = Axis("world", world, rank, 0, 1, world_group, wire)
    return Grid(axes["tensor"], axes["data"], axes["pipeline"], whole, _ends(axes["pipeline"]))


def parallel_axes(pipeline: Axis) -> list[range]:
    """The ranks of every pipeline of the world, which differ in their data and tensor ranks."""
    return [range(first, first + pipeline.size * pipeline.stride, pipeline.stride) for first in range(pipeline.stride)]


def _ends(pipeline: Axis) -> Axis:
    """The first and the last rank of a pipeline; for those between, nobody. Every rank of the world calls it."""
    last = pipeline.size - 1
    group = pipeline.group
    if last > 1:
        for ranks in parallel_axes(pipeline):
            made = dist.new_group([ranks[0], ranks[last]], timeout=pipeline.wire.timeout)
            if ranks.start == pipeline.first and pipeline.rank in (0, last):
                assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
                group = made
    if last == 0 or pipeline.rank not in (0, last):
        return Axis("ends", wire=pipeline.wire)
    ranks = [pipeline.ranks[0], pipeline.ranks[last]]
    return Axis("ends", 2, int(pipeline.rank == last), ranks[0], ranks[1] - ranks[0], group, pipeline.wire)
