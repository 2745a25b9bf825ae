"""Hold the components of a sharded module and the engine that trains it; run the backwards of its steps.

One backward trains one module, or several in the same graph. Parameters that were frozen at first may be trained later.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.comm.grid import Grid
from megazero.comm.pool import Scratch
from megazero.kernels.operations import Operations
from megazero.library.adopt import Memory
from megazero.library.calls import Calls
from megazero.library.optimizers import Following, Recipe
from megazero.library.parameters import guard
from megazero.library.parts import Part
from megazero.library.shown import watch
from megazero.library.tables import Tables
from megazero.library.values import in_lockstep
from megazero.zero.engine import Engine
from megazero.zero.placement import STAGES
from megazero.zero.unit import Unit


class Assembly:
    """A sharded module; its parameters refuse operations that sharding rules out (`parameters.py`).

    Args:
        module: the user's module; its parameters are views of the units.
        tables: the tables whose rows are split over the ranks.
        recipe: makes the optimizer.
        clip: the largest allowed global gradient norm; 0 disables clipping.

    Attributes:
        optimizer: updates the trained units.
        engine: trains these units, in the order of the module.
        stage_gradients: the gradients of these units.
        trains: whether the module has anything to train.
        backwards: the number of backwards in this step so far.
        frozen: the names of trained parameters that were frozen in all of this step's backwards.
    """

    def __init__(
        self, module: nn.Module, calls: Calls, tables: Tables, recipe: Recipe, grid: Grid, memory: Memory, clip: float
    ):
        self.module, self.calls, self.values, self.tables = module, calls, calls.values, tables
        self.recipe, self.grid, self.memory, self._clip = recipe, grid, memory, clip
        guard(module, self.values, tables.shards)
        ops = self._update_kernels()
        self.optimizer = Following(self._trained(), recipe, grid.comm.bucket, ops, Scratch(grid.comm.ledger))
        self._make_engine(ops)

    def _trained(self) -> list[Unit]:
        return [unit for unit in self.values.units if unit.trainable]

    def _update_kernels(self) -> Operations:
        units = self._trained()
        wide = any(unit.masters.dtype == torch.float64 for unit in units)
        narrow = next((unit.resting.updated.values.dtype for unit in units), torch.float32)
        return self.memory.ops(torch.float64 if wide else narrow, updates=True)

    def _make_engine(self, ops: Operations) -> None:
        units = self._trained()
        names = [unit.layout.name for unit in units]
        self.engine = Engine(
            [names],
            units,
            names,
            self.optimizer,
            clips=[self._clip, *self.recipe.clips],
            tokens_per_step=1,
            grid=self.grid,
            scaling=any(unit.resting.parameters.values.dtype == torch.float16 for unit in units),
            ops=ops,
            offload=self.memory.tiers.offload,
            extensions=self.memory.tiers.all_extensions,
            halts=False,
            gather=self.values.gather,
        )
        (self.stage_gradients,) = self.engine.stages
        self.trains = bool(units or self.tables.trained)
        self._shards_gradients = any(not unit.gradients.rest_whole for unit in units)
        self._all_summed = False
        self.begin_step()

    def thaw(self, updates: int) -> None:
        """Start to train the parameters that were frozen and have been unfrozen.

        Args:
            updates: the number of updates done so far.

        Raises:
            UserError: 502, a step is under way, the module has no optimizer, or a parameter cannot be trained.
        """
        if self.backwards:
            self.refuse_thawed()
        thawed = [member for part in self.parts for member in part.thawed]
        if not self.trains:
            what = f"{thawed[0].name} requires a gradient, and the module was sharded without an optimizer"
            raise UserError(502, what, "keep it frozen")
        if odd := next((member for member in thawed if not member.parameter.is_floating_point()), None):
            what = f"{odd.name} requires a gradient, but only floating-point parameters can be trained"
            raise UserError(502, what, "keep it frozen")
        self.values.release_all()
        for part in self.parts:
            for unit in dict.fromkeys(member.unit for member in part.thawed):
                self.optimizer.add(self._thawed(part, unit), updates)
        before = self.engine.loss_scale
        self._make_engine(self._update_kernels())
        if before.dynamic:
            self.engine.loss_scale = before
        self.values.begin_epoch()  # an older graph would gather a unit that has been replaced

    def _thawed(self, part: Part, unit: Unit) -> Unit:
        """Replace a frozen unit by a trained one with its values and its parameters; return the new unit."""
        layout = replace(unit.layout, name=unit.name.replace("frozen)", "unfrozen)"))
        frozen = unit.resting.parameters
        new = self.memory.unit(layout, frozen.values.dtype, trained=True)
        new.resting.write(frozen.values.to(new.masters.dtype), frozen.first)
        members = sorted((member for member in part.members if member.unit is unit), key=lambda member: member.index)
        new.parameters.move_to([member.parameter for member in members])
        for member in members:
            member.unit = new
        there = "" if frozen.home is None else "host_"
        self.memory.world.comm.ledger.hold(f"{there}parameters", -frozen.values.nbytes)
        part.find_units()
        watch(part, new, self.calls.stray)
        return new

    def begin_step(self) -> None:
        """Begin a step: no backward has run, and there are no gradients."""
        self.engine.begin_step()
        self.backwards, self._reduced, self._failed = 0, False, False
        self.frozen = set[str]()

    def begin(self, loss: Tensor, *, last: bool) -> Tensor:
        """Prepare for the gradients of a loss; return the scaled loss. `last`: see `Sharded.backward`."""
        sends = last or self._shards_gradients
        if sends:
            self.meet("backward")
        else:
            self.values.require_unchanged()
        self.refuse_thawed()
        if self._failed:
            self.forget()
        if self.backwards:
            self.stage_gradients.finish_reduction()
            if self._all_summed and not self._shards_gradients:
                for unit in self.engine.units:
                    unit.gradients.keep_own()
                self.stage_gradients.clear()  # the next reduction then includes the result of the last one
        self._all_summed, self._reduced, self._failed = last, sends, True
        parts = self.parts
        now = {member.name for part in parts for member in part.trained}
        now -= {member.name for part in parts for member in part.live}
        self.frozen = self.frozen & now if self.backwards else now
        self.backwards += 1
        first = torch.full((), float(self.backwards == 1), device=self.engine.loss_scale.scale.device)
        return self.engine.loss(loss, first)

    def run(self, begin: Callable[[], None], *, factor: Tensor | None) -> None:
        """Run autograd by calling `begin`, and collect the gradients.

        Args:
            factor: multiplies the gradients; None: they stay as they are (`Calls`).
        """
        with self.calls.backward(factor):
            self.stage_gradients.backward(0, begin, reduce=self._reduced, last=False)
        self._failed = False

    def require_whole(self) -> None:
        """Refuse a step without an optimizer (UserError 510), or if gradients are missing or not all reduced (503)."""
        if not self.trains:
            raise UserError(510, "the module was sharded without an optimizer", "give shard an optimizer", where="step")
        if self._failed:
            raise UserError(503, "the last backward failed", "run the step's forward and backward again", where="step")
        self.require_backward("step", summed=self._all_summed)

    def refuse_thawed(self) -> None:
        """Refuse parameters that were unfrozen since the step's first forward. Raises UserError 502."""
        if thawed := [member.name for part in self.parts for member in part.thawed]:
            what = f"{thawed[0]} was unfrozen between a forward and its step"
            raise UserError(502, what, "call requires_grad_(True) after a step and before the next forward")

    def require_backward(self, call: str, *, summed: bool | None = None) -> None:
        """Refuse `call` if no backward has run, or gradients are not reduced. Raises UserError 503.

        `summed` says whether they are all reduced; None: it is enough that the last backward reduced its own.
        """
        if not self.backwards:
            raise UserError(503, f"{call} without a backward", "call sharded.backward(loss) first", where=call)
        if not (self._reduced if summed is None else summed):
            do = "call the last one with last=True, which reduces gradients"
            raise UserError(503, "the last backward of the step had last=False", do, where=call)

    def forget(self) -> None:
        """Wait for reductions under way, and drop the gradients of this step."""
        self.stage_gradients.finish_reduction()
        for unit in self.engine.units:
            unit.gradients.drop()
        for group in self.tables.groups:
            group.forget()
        self.values.release_all()
        self.begin_step()

    def meet(self, call: str) -> None:
        """Wait until all ranks have reached a call, one of `values.CALLS`. Raises the errors of `Values.meet`."""
        self.values.meet(self.memory.axes, call)

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return next(number for number, one in STAGES.items() if one is self.memory.axes.stage)

    @property
    def parts(self) -> Sequence[Part]:
        """Return the parts of the module, the root first."""
        return self.values.parts


def run_backward(loss: Tensor, modules: Sequence[Assembly], *, last: bool) -> None:
    """Compute the gradients of a loss for some modules, and reduce them; see `sharded.backward`.

    The modules reduce one after the other, the last one first, in whichever order their gradients arrive.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        got += " without a graph" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        what = f"expected one number that depends on parameters, got {got}"
        raise UserError(505, what, "give the mean of the losses, outside of torch.no_grad()", where="backward")
    if not modules or not all(module.trains for module in modules):
        what = "a module that was sharded without an optimizer" if modules else "without a module"
        raise UserError(510, f"backward {what}", "name the modules that are trained", where="backward")
    first = modules[0]
    with in_lockstep(first.values.rank), first.values.process.backward():
        total, *_ = [module.begin(loss, last=last) for module in modules]
        scales = [module.engine.loss_scale for module in modules]
        factors: Sequence[Tensor | None] = [None] * len(modules)
        if len(modules) > 1 and any(scale.dynamic for scale in scales):
            smallest = torch.stack([scale.scale for scale in scales if scale.dynamic]).amin()
            total = loss * smallest
            factors = [scale.scale / smallest for scale in scales]
        assert total.grad_fn is not None, "the loss has a graph"
        begin = total.backward
        follows = None
        for module, factor in zip(reversed(modules), reversed(factors), strict=True):
            module.stage_gradients.reduction.follows, follows = follows, module.stage_gradients.reduction
            total.grad_fn.register_prehook(module.calls.begin_backward)
            begin = partial(module.run, begin, factor=factor)
        begin()
