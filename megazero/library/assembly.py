"""Hold all that a sharded module is made of, and the engine that trains it; train later what was frozen at first."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megazero.base.errors import UserError
from megazero.comm.grid import Axis, Grid
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose
from megazero.library.built import BuiltPart, watch
from megazero.library.calls import Calls
from megazero.library.following import Following
from megazero.library.lockstep import Lockstep
from megazero.library.optimizers import Recipe
from megazero.library.tables import Tables
from megazero.library.values import Values
from megazero.zero.engine import Engine
from megazero.zero.layout import UnitLayout
from megazero.zero.offload import Offload
from megazero.zero.placement import STAGES, Precision, UnitAxes
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Memory:
    """The memory of units: over which ranks and where they rest, their buffers, the kernels that compute on them."""

    axes: UnitAxes
    device: torch.device
    ledger: Ledger
    offload: Offload | None
    kernels: str
    _pools: dict[torch.dtype, Pool] = field(default_factory=dict)

    def ops(self, dtype: torch.dtype, *, updates: bool = False) -> Operations:
        """Return the kernels next to parameters of a dtype; those of an update are where the update is."""
        return choose(self.kernels, torch.device("cpu") if updates and self.updates_on_host else self.device, dtype)

    @property
    def updates_on_host(self) -> bool:
        """Return whether the optimizer's state rests on the host, which updates it."""
        return self.offload is not None and self.offload.optimizer is not None

    def pool(self, dtype: torch.dtype) -> Pool:
        """Return the buffers of all units for whole parameters, and whole gradients, of a dtype."""
        return self._pools.setdefault(dtype, Pool(dtype, self.device, self.ledger, "pool"))

    def unit(self, layout: UnitLayout, dtype: torch.dtype, *, trained: bool) -> Unit:
        """Return a unit of zeros."""
        narrow = dtype in (torch.bfloat16, torch.float16)
        precision = Precision(dtype, torch.float32 if narrow else dtype)
        return Unit(
            layout,
            self.axes,
            precision,
            self.device,
            (self.pool(dtype), self.pool(precision.gradients)),
            self.offload,
            ops=self.ops(dtype if dtype.is_floating_point else torch.float32),
            trainable=trained,
        )


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
    lockstep: Lockstep
    recipe: Recipe
    grid: Grid
    memory: Memory
    clip: float
    optimizer: Following = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = self.recipe.make(self._trained(), self.grid.comm.bucket, self._update_kernels())
        there = "host_" if self.memory.updates_on_host else ""
        self.memory.ledger.hold(f"{there}staging", self.optimizer.staging_bytes)
        self.engine = self._engine()

    @property
    def world(self) -> Axis:
        """Return all ranks."""
        return self.grid["world"]

    @property
    def stage(self) -> int:
        """Return the stage of ZeRO."""
        return next(number for number, one in STAGES.items() if one is self.memory.axes.stage)

    @property
    def parts(self) -> Sequence[BuiltPart]:
        """Return the parts of the module, the root first."""
        return self.values.parts

    def _trained(self) -> list[Unit]:
        return [unit for unit in self.values.units if unit.trainable]

    def _update_kernels(self) -> Operations:
        units = self._trained()
        wide = any(unit.masters.dtype == torch.float64 for unit in units)
        narrow = next((unit.updated.values.dtype for unit in units), torch.float32)
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
            scaling=any(unit.parameters.values.dtype == torch.float16 for unit in units),
            ops=self._update_kernels(),
            offload=self.memory.offload,
            halts=False,
            gather=self.values.gather,
        )

    def thaw(self, updates: int) -> None:
        """Train from now on what was frozen and is not any more.

        Args:
            updates: those that have been done.

        Raises:
            UserError: 502, a parameter cannot be trained.
        """
        for part in self.parts:
            for unit in dict.fromkeys(shown.unit for shown in part.thawed):
                new = self._thawed(part, unit)
                watch(part, new, self.calls.stray)
                self.optimizer.add(new, updates)
        before, self.engine = self.engine, self._engine()
        if before.loss_scale.dynamic:
            self.engine.loss_scale = before.loss_scale

    def _thawed(self, part: BuiltPart, unit: Unit) -> Unit:
        """Return a unit with what training needs in the place of a frozen one, with its values and parameters."""
        for shown in part.thawed:
            why = "" if self.recipe.trains else "the module was sharded without an optimizer"
            if not shown.parameter.is_floating_point():
                why = "only parameters of floating point are trained"
            if why:
                raise UserError(502, f"{shown.name} requires a gradient, and {why}", "keep it frozen")
        layout = replace(unit.layout, name=unit.name.replace("frozen)", "unfrozen)"))
        new = self.memory.unit(layout, unit.parameters.values.dtype, trained=True)
        new.resting.write(unit.parameters.values.to(new.masters.dtype), unit.parameters.first)
        by_name = {shown.name: shown.parameter for shown in part.frozen}
        new.move_parameters([by_name[interval.name] for interval in layout.intervals])
        there = "" if unit.parameters.home is None else "host_"
        self.memory.ledger.hold(f"{there}parameters", -unit.parameters.values.nbytes)
        part.give(unit, new)
        return new
