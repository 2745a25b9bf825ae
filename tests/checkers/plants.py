"""Layouts of every kind, and mistakes in their waits: each is taken away for a test, and has to be found."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megazero.comm.collectives import Pending, done
from megazero.comm.context import CommContext
from megazero.comm.grid import make_grid
from megazero.comm.host import Host
from megazero.comm.pool import Pool
from megazero.comm.regions import Region
from megazero.comm.streams import SideStream
from megazero.comm.transport.nccl_channels import NcclChannels
from megazero.memory import partition
from megazero.memory.activation_store import Arena
from megazero.model import linear
from megazero.zero.gather import Gather
from megazero.zero.offload import Offload
from megazero.zero.placement import Precision
from megazero.zero.reduce import Reduction
from megazero.zero.unit import Unit
from megazero.zero.unit_gradients import UnitGradients
from tests.layouts import job_on

OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
FULL_RECOMPUTE = {"recompute": "full", "partition": True}
LAYOUTS = {
    "stage 0": job_on(1, 2, False, 2, 0),
    "stage 1": job_on(1, 2, False, 2, 1),
    "stage 2": job_on(1, 2, False, 2, 2),
    "stage 3": job_on(2, 2, True, 2, 3),
    "hybrid": job_on(1, 4, False, 1, 3, shard_ranks=2),
    "quantised": job_on(1, 2, False, 2, 3, quantize_parameters="int8", quantize_gradients="int4"),
    "quantised, near": job_on(
        1, 4, False, 2, 3, secondary_ranks=2, quantize_parameters="int8", quantize_gradients="int8"
    ),
    "1f1b": job_on(1, 1, False, 4, 1, pipeline=2),
    "zb-v": job_on(1, 2, False, 2, 3, pipeline=2, schedule="zb-v", chunks=2),
    "offload": job_on(1, 2, False, 2, 3, **OFFLOADED),
    "optimizer offloaded": job_on(1, 2, False, 2, 2, offload_optimizer="cpu"),
    "one shard rank, offload": job_on(1, 2, False, 2, 3, shard_ranks=1, **OFFLOADED),
    "delayed": job_on(1, 2, False, 1, 1, offload_optimizer="cpu", delayed=True),
    "Pa": job_on(2, 1, False, 2, 1, **FULL_RECOMPUTE),
    "Pa+cpu": job_on(2, 1, False, 2, 1, offload="cpu", **FULL_RECOMPUTE),
    "chunks": job_on(2, 1, False, 2, 1, tensor_chunks=2),
    "chunks, sequence": job_on(2, 2, True, 2, 3, tensor_chunks=3),
}
BF16, SUMS_IN_BF16 = Precision(torch.bfloat16), Precision(reduced=torch.bfloat16)


def without(owner: type, attribute: str, method: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what takes a wait away: calls of `method` on one attribute of a class's objects."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = owner.__init__

        def init(self: Any, *arguments: Any, **options: Any) -> None:
            honest(self, *arguments, **options)
            setattr(getattr(self, attribute), method, lambda *_: None)

        patch.setattr(owner, "__init__", init)

    return plant


def plant_keep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SideStream, "keep", lambda *_: None)


def plant_open(patch: pytest.MonkeyPatch) -> None:
    """The memory for gradients is written to while its last content is still on its way to the host."""
    patch.setattr(Offload, "join", lambda _: None)


def plant_settle(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Host, "settle", lambda _: None)


def plant_early_drop(patch: pytest.MonkeyPatch) -> None:
    """The memory of gradients is given back before their reduction is waited for."""
    honest = Reduction._finish

    def finish(self: Reduction, leave: int) -> None:
        for unit, _ in list(self._under_way):
            if unit.gradients.partial is not None and not unit.gradients.rest_whole and leave:
                unit.gradients._pool.give(unit.gradients.partial)
                unit.gradients.partial = None
        honest(self, leave)

    patch.setattr(Reduction, "_finish", finish)


def plant_unwaited(patch: pytest.MonkeyPatch) -> None:
    """A unit of an update is not waited for where the next forward needs it."""
    honest = Gather.unshard

    def unshard(self: Gather, units: list[Unit]) -> None:
        if not (len(units) == 1 and units[0].parameters.publishes):
            honest(self, units)

    patch.setattr(Gather, "unshard", unshard)


def plant_slot(patch: pytest.MonkeyPatch) -> None:
    """What a kept input once did: its slot was given back while the copy out of it was queued."""
    honest = partition._Part.start

    def start(self: Any) -> None:
        honest(self)
        if self._slot is not None:
            self._store.arena.give(self._slot)
            self._slot = None

    patch.setattr(partition._Part, "start", start)


def store_of(comm: CommContext) -> partition.PartitionedStore:
    """Return a store of inputs that two ranks share."""
    cpu = torch.device("cpu")
    axis = make_grid(comm=comm, device_type="cpu", tensor=2)["tensor"]
    arena = Arena(3, 4, torch.float32, cpu, comm.ledger)
    return partition.PartitionedStore(arena, axis, Pool(torch.float32, cpu, comm.ledger, "pool"), cpu)


def keep_three(store: partition.PartitionedStore) -> Tensor:
    """Keep an input while the first one is on its way back; return the first one."""
    first, second = (store(torch.full([8], x)) for x in (1.0, 2.0))
    second.restore()
    second.free()
    store(torch.full([8], 3.0))
    return first.restore()


def plant_send(patch: pytest.MonkeyPatch) -> None:
    """A message is sent from memory that is written to at once."""
    honest = NcclChannels.send

    def send(self: Any, channel: Any, number: int, x: Tensor) -> None:
        honest(self, channel, number, x)
        x.add_(1.0)

    patch.setattr(NcclChannels, "send", send)


def plant_receive(patch: pytest.MonkeyPatch) -> None:
    """A message is used without a wait for it."""
    honest = NcclChannels.post

    def post(self: Any, channel: Any, number: int, into: Tensor) -> Any:
        _, came = honest(self, channel, number, into)
        return lambda: into, came

    patch.setattr(NcclChannels, "post", post)


def plant_queued(patch: pytest.MonkeyPatch) -> None:
    """The side stream of copies does not wait for what computes the values."""

    def queued(self: SideStream) -> Any:
        return nullcontext() if self._streams is None else self._streams.use(self._stream)

    patch.setattr(SideStream, "queued", queued)


def plant_wait(patch: pytest.MonkeyPatch) -> None:
    """The host sends gradients while the delayed update still reads those of the step before."""
    honest = UnitGradients.send

    def send(self: UnitGradients, reduced: Tensor, at: int = 0) -> None:
        self.wait = lambda: None
        honest(self, reduced, at)

    patch.setattr(UnitGradients, "send", send)


def plant_chunk(patch: pytest.MonkeyPatch) -> None:
    """The sums of a product's chunks are not waited for."""
    honest = Region.sum

    def sum_(region: Region, partial: Tensor, direction: str, out: Tensor | None = None) -> Pending:
        pending = honest(region, partial, direction, out)
        return pending if out is None else done(out)

    patch.setattr(Region, "sum", sum_)


def plant_shared_chunk(patch: pytest.MonkeyPatch) -> None:
    """A chunk's product is written to where the chunk before it is still being sent from."""
    honest, buffers = linear._product, dict[tuple[int, ...], Tensor]()

    def product(x: Tensor, matrix_IO: Tensor, bias_O: Tensor | None, out: Tensor | None = None) -> Tensor:
        if x.dim() == 3 and out is None:
            shape = (*x.shape[:2], matrix_IO.shape[1])
            out = buffers.setdefault(shape, x.new_empty(shape))
        return honest(x, matrix_IO, bias_O, out)

    patch.setattr(linear, "_product", product)


class Plant(NamedTuple):
    """A wait that is taken away.

    Attributes:
        race: what `races.py` says of it.
        order: in which `late.py` computes other bits; None: in none.
    """

    take_away: Callable[[pytest.MonkeyPatch], None]
    layout: str
    race: str
    order: str | None


PLANTS = {
    "gather, stage 1": Plant(without(Gather, "_stream", "join"), "stage 1", "not behind all_gather", "late"),
    "gather, stage 3": Plant(without(Gather, "_stream", "join"), "stage 3", "not behind all_gather", "late"),
    "reduction": Plant(without(Reduction, "_stream", "join"), "stage 2", "not behind reduce_scatter", "late"),
    "fetch": Plant(without(Host, "_stream", "join"), "offload", "not behind aten::copy_ on side", "late"),
    "kept input": Plant(without(partition.PartitionedStore, "stream", "join"), "Pa", "not behind all_gather", "late"),
    "keep": Plant(plant_keep, "Pa+cpu", "is freed before aten::copy_", None),
    "open": Plant(plant_open, "optimizer offloaded", "reduce_scatter", "late"),  # no gather from the host in between
    "settle": Plant(plant_settle, "offload", "aten::_fused_adamw_ on host is not behind", "late"),
    "early drop": Plant(plant_early_drop, "stage 2", "not behind reduce_scatter", "late"),
    "unwaited": Plant(plant_unwaited, "stage 1", "not behind all_gather", "late"),
    "send": Plant(plant_send, "1f1b", "not behind send", "late"),
    "receive": Plant(plant_receive, "1f1b", "not behind receive", "late"),
    "queued": Plant(plant_queued, "offload", "aten::copy_ on side 1 is not behind", "early"),
    "wait": Plant(plant_wait, "delayed", "is not behind aten::_fused_adamw_ on thread of updates", "late"),
    "chunk": Plant(plant_chunk, "chunks", "not behind all_reduce", "late"),
    "chunk, sequence": Plant(plant_chunk, "chunks, sequence", "not behind reduce_scatter", "late"),
    "shared chunk": Plant(plant_shared_chunk, "chunks, sequence", "not behind reduce_scatter", "late"),
}
