"""Give parts of a module units and an engine that trains them, and give more of them what training needs later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megazero.base.errors import UserError
from megazero.comm.grid import Grid
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose
from megazero.library.agreed import AgreedGather
from megazero.library.built import BuiltPart, Shown, watch
from megazero.library.following import following_of
from megazero.library.optimizers import Recipe
from megazero.zero.engine import Engine
from megazero.zero.gather import Gather
from megazero.zero.layout import UnitLayout
from megazero.zero.offload import Offload
from megazero.zero.placement import Precision, UnitAxes
from megazero.zero.resting import Resources
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Memory:
    """The memory of units: where they rest, their buffers, and the kernels that compute on them."""

    device: torch.device
    ledger: Ledger
    offload: Offload | None
    kernels: str
    _pools: dict[torch.dtype, Pool] = field(default_factory=dict)

    def ops(self, dtype: torch.dtype, *, updates: bool = False) -> Operations:
        """Return the kernels beside parameters of a dtype; those of an update are where the update is."""
        there = updates and self.offload is not None and self.offload.optimizer is not None
        return choose(self.kernels, torch.device("cpu") if there else self.device, dtype)

    def pool(self, dtype: torch.dtype) -> Pool:
        """Return the buffers of all units for whole parameters, and whole gradients, of a dtype."""
        return self._pools.setdefault(dtype, Pool(dtype, self.device, self.ledger, "pool"))


def unit_of(layout: UnitLayout, dtype: torch.dtype, memory: Memory, axes: UnitAxes, *, trained: bool) -> Unit:
    """Return a unit of zeros."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    precision = Precision(dtype, torch.float32 if narrow else dtype)
    resources = Resources(
        precision,
        memory.device,
        memory.pool(dtype),
        memory.pool(precision.gradients),
        offload=memory.offload or Offload(),
        ops=memory.ops(dtype if dtype.is_floating_point else torch.float32),
    )
    return Unit(layout, axes, resources, trainable=trained)


@dataclass(frozen=True)
class Assembly:
    """The parts of a module, and what their engine is made of.

    Attributes:
        parts: of the module, the root first.
        recipe: of the optimizer.
        clip: the largest global gradient norm let through; 0: no clipping.
        gather: of all units.
    """

    parts: Sequence[BuiltPart]
    recipe: Recipe
    grid: Grid
    memory: Memory
    clip: float
    gather: Gather

    def engine(self, before: Engine | None = None) -> Engine:
        """Return the engine over the units that are trained, in the order of the module.

        Args:
            before: the engine over fewer units, whose optimizer has been given the new ones; None: there was none.
        """
        memory, units = self.memory, [unit for part in self.parts for unit in part.units if unit.trainable]
        names = [unit.layout.name for unit in units]
        wide = any(unit.masters.dtype == torch.float64 for unit in units)
        narrow = next((unit.resting.updated.values.dtype for unit in units), torch.float32)
        ops = memory.ops(torch.float64 if wide else narrow, updates=True)
        if before is None:
            there = "host_" if memory.offload is not None and memory.offload.optimizer is not None else ""
            optimizer = self.recipe.make(units, self.grid.comm.bucket, ops)
            memory.ledger.hold(f"{there}staging", optimizer.staging_bytes)
        else:
            optimizer = before.optimizer
        engine = Engine(
            [names],
            units,
            names,
            optimizer,
            clip=self.clip,
            tokens_per_step=1,
            grid=self.grid,
            scaling=any(unit.resting.parameters.values.dtype == torch.float16 for unit in units),
            ops=ops,
            offload=memory.offload,
            halts=False,
            gather=self.gather,
        )
        if before is not None and before.loss_scale.dynamic:
            engine.loss_scale = before.loss_scale
        if isinstance(self.gather, AgreedGather):
            engine.stages[0].reduction.before = self.gather.before_sum
        return engine

    def thaw(self, before: Engine, updates: int, take: Callable[[BuiltPart, Shown, nn.Parameter], object]) -> Engine:
        """Return an engine that trains too what was frozen and is not any more.

        Args:
            before: the engine so far.
            updates: those that it has done.
            take: gets the gradients that come to parameters themselves.

        Raises:
            UserError: 502, a parameter cannot be trained.
        """
        for part in self.parts:
            for unit in dict.fromkeys(shown.unit for shown in part.thawed):
                new = self._thawed(part, unit)
                watch(part, new, take)
                following_of(before).add(new, updates)
                if isinstance(self.gather, AgreedGather):
                    self.gather.replace(unit, new)
        return self.engine(before)

    def _thawed(self, part: BuiltPart, unit: Unit) -> Unit:
        """Return a unit with what training needs in the place of a frozen one, with its values and parameters."""
        for shown in part.thawed:
            why = "" if self.recipe.trains else "the module was sharded without an optimizer"
            if not shown.parameter.is_floating_point():
                why = "only parameters of floating point are trained"
            if why:
                raise UserError(502, f"{shown.name} requires a gradient, and {why}", "keep it frozen")
        layout = replace(unit.layout, name=unit.name.replace("frozen)", "unfrozen)"))
        new = unit_of(layout, unit.resting.parameters.values.dtype, self.memory, unit.axes, trained=True)
        new.resting.write(unit.resting.parameters.values.to(new.masters.dtype), unit.resting.parameters.first)
        by_name = {shown.name: shown.parameter for shown in part.frozen}
        new.parameters.move_to([by_name[interval.name] for interval in layout.intervals])
        there = "" if unit.resting.parameters.home is None else "host_"
        self.memory.ledger.hold(f"{there}parameters", -unit.resting.parameters.values.nbytes)
        part.give(unit, new)
        return new
