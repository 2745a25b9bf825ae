"""Hold all that a sharded module is made of, and the engine that trains it; train later what was frozen at first."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megazero.comm.grid import Axis, Grid
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose
from megazero.library.calls import Calls
from megazero.library.following import Following
from megazero.library.lockstep import meet
from megazero.library.optimizers import Recipe
from megazero.library.parts import Part
from megazero.library.shown import watch
from megazero.library.tables import Tables
from megazero.library.values import Values
from megazero.zero.engine import Engine
from megazero.zero.layout import UnitLayout
from megazero.zero.offload import Offload
from megazero.zero.placement import STAGES, Precision, UnitAxes
from megazero.zero.resting import Resources
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Memory:
    """The memory of units: over which ranks and where they rest, their buffers, the kernels that compute on them."""

    axes: UnitAxes
    device: torch.device
    ledger: Ledger
    offload: Offload
    kernels: str
    _pools: dict[torch.dtype, Pool] = field(default_factory=dict)

    def ops(self, dtype: torch.dtype, *, updates: bool = False) -> Operations:
        """Return the kernels next to parameters of a dtype; those of an update are where the update is."""
        on_host = updates and self.offload.optimizer is not None
        return choose(self.kernels, torch.device("cpu") if on_host else self.device, dtype)

    def pool(self, dtype: torch.dtype) -> Pool:
        """Return the buffers of all units for whole parameters, and whole gradients, of a dtype."""
        return self._pools.setdefault(dtype, Pool(dtype, self.device, self.ledger, "pool"))

    def unit(self, layout: UnitLayout, dtype: torch.dtype, *, trained: bool) -> Unit:
        """Return a unit of zeros."""
        narrow = dtype in (torch.bfloat16, torch.float16)
        precision = Precision(dtype, torch.float32 if narrow else dtype)
        resources = Resources(
            precision,
            self.device,
            self.pool(dtype),
            self.pool(precision.gradients),
            offload=self.offload,
            ops=self.ops(dtype if dtype.is_floating_point else torch.float32),
        )
        return Unit(layout, self.axes, resources, trainable=trained)


@dataclass(eq=False)
class Assembly:
    """A sharded module.

    Attributes:
        module: its parameters are those of the units.
        tables: whose rows are split.
        recipe: of the optimizer.
        clip: the largest global gradient norm let through; 0: no clipping.
        optimizer: over the units that are trained.
        engine: over these units, in the order of the module.
    """

    module: nn.Module
    values: Values
    calls: Calls
    tables: Tables
    recipe: Recipe
    grid: Grid
    memory: Memory
    clip: float
    optimizer: Following = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        bucket, ops = self.grid.comm.bucket, self._update_kernels()
        self.optimizer = Following(self._trained(), lambda unit: self.recipe.make(unit, bucket, ops), self.recipe.state)
        self.engine = self._engine()

    def _trained(self) -> list[Unit]:
        return [unit for unit in self.values.units if unit.trainable]

    def _update_kernels(self) -> Operations:
        units = self._trained()
        wide = any(unit.masters.dtype == torch.float64 for unit in units)
        narrow = next((unit.resting.updated.values.dtype for unit in units), torch.float32)
        return self.memory.ops(torch.float64 if wide else narrow, updates=True)

    def _engine(self) -> Engine:
        units = self._trained()
        names = [unit.layout.name for unit in units]
        return Engine(
            [names],
            units,
            names,
            self.optimizer,
            clip=self.clip,
            tokens_per_step=1,
            grid=self.grid,
            scaling=any(unit.resting.parameters.values.dtype == torch.float16 for unit in units),
            ops=self._update_kernels(),
            offload=self.memory.offload,
            halts=False,
            gather=self.values.gather,
        )

    def thaw(self, updates: int) -> None:
        """Train from now on the parameters that were frozen and are not frozen any more.

        Args:
            updates: the number of updates that have been done.
        """
        self.values.release_all()
        for part in self.parts:
            for unit in dict.fromkeys(member.unit for member in part.thawed):
                self.optimizer.add(self._thawed(part, unit), updates)
        before, self.engine = self.engine, self._engine()
        if before.loss_scale.dynamic:
            self.engine.loss_scale = before.loss_scale
        self.values.begin_epoch()  # a graph of before would gather a unit that is gone

    def _thawed(self, part: Part, unit: Unit) -> Unit:
        """Return a trained unit in the place of a frozen one, with its values and its parameters."""
        layout = replace(unit.layout, name=unit.name.replace("frozen)", "unfrozen)"))
        frozen = unit.resting.parameters
        new = self.memory.unit(layout, frozen.values.dtype, trained=True)
        new.resting.write(frozen.values.to(new.masters.dtype), frozen.first)
        members = sorted((member for member in part.members if member.unit is unit), key=lambda member: member.index)
        new.parameters.move_to([member.parameter for member in members])
        for member in members:
            member.unit = new
        there = "" if frozen.home is None else "host_"
        self.memory.ledger.hold(f"{there}parameters", -frozen.values.nbytes)
        part.find_units()
        watch(part, new, self.calls.stray)
        return new

    def meet(self, meeting: str) -> None:
        """Wait until all ranks have come to one of the calls in `lockstep.MEETINGS`. Raises UserError 502, 507."""
        meet(self.values, self.memory.axes, meeting)

    @property
    def world(self) -> Axis:
        """Return all ranks."""
        return self.grid["world"]

    @property
    def stage(self) -> int:
        """Return the stage of ZeRO."""
        return next(number for number, one in STAGES.items() if one is self.memory.axes.stage)

    @property
    def parts(self) -> Sequence[Part]:
        """Return the parts of the module, the root first."""
        return self.values.parts
