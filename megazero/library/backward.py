"""Run the backwards of a step, each of one module or of several that are in one graph."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.library.assembly import Assembly
from megazero.library.lockstep import in_lockstep


class Backwards:
    """The backwards of a step of one module.

    Attributes:
        trains: the module has something to train.
        count: the backwards of this step so far.
        frozen: the trained parameters that were frozen in all of them, by name.
    """

    def __init__(self, assembly: Assembly):
        self.assembly, self.engine = assembly, assembly.engine
        self.trains = bool(self.engine.units or assembly.tables.trained)
        self._shards_gradients = any(not unit.gradients.rest_whole for unit in self.engine.units)
        self._one = torch.ones((), device=self.engine.loss_scale.scale.device)
        self._all_summed = False
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: there is no gradient yet."""
        self.engine.begin_step()
        self.count, self._reduced, self._failed = 0, False, False
        self.frozen: set[str] = set()

    def begin(self, loss: Tensor, *, last: bool) -> Tensor:
        """Prepare for the gradients of a loss; return the scaled loss."""
        sends = last or self._shards_gradients
        if sends:
            self.assembly.meet("backward")
        else:
            self.assembly.values.require_unchanged()
        self.refuse_thawed()
        (stage,) = self.engine.stages
        if self._failed:
            self.forget()
        if self.count:
            stage.finish_reduction()
            if self._all_summed and not self._shards_gradients:
                for unit in self.engine.units:
                    unit.gradients.keep_own()
                stage.clear()  # the next reduction includes the last one
        self._all_summed, self._reduced, self._failed = last, sends, True
        parts = self.assembly.parts
        now = {member.name for part in parts for member in part.trained}
        now -= {member.name for part in parts for member in part.live}
        self.frozen = self.frozen & now if self.count else now
        self.count += 1
        return self.engine.loss(loss, self._one if self.count == 1 else self._one - 1)

    def run(self, begin: Callable[[], None], *, factor: Tensor | None) -> None:
        """Run autograd, `begin`, while gradients are taken.

        Args:
            factor: what they are multiplied by (`Calls`).
        """
        (stage,) = self.engine.stages
        with self.assembly.calls.backward(factor):
            stage.backward(0, begin, reduce=self._reduced, last=False)
        self._failed = False

    def require_whole(self) -> None:
        """Refuse a step without gradients, or with some that have not been summed. Raises UserError 503, 510."""
        if not self.trains:
            raise UserError(510, "the module was sharded without an optimizer", "give shard one", where="step")
        if self._failed:
            raise UserError(503, "the last backward failed", "run the step's forward and backward again", where="step")
        self.require_backward("step", summed=self._all_summed)

    def refuse_thawed(self) -> None:
        """Refuse parameters that were unfrozen since the step's first forward. Raises UserError 502."""
        if thawed := [member.name for part in self.assembly.parts for member in part.thawed]:
            what = f"{thawed[0]} was unfrozen between a forward and its step"
            raise UserError(502, what, "call requires_grad_(True) after the step, and then the module")

    def require_backward(self, call: str, *, summed: bool | None = None) -> None:
        """Refuse a look at gradients that are not there, or have not been summed. Raises UserError 503."""
        if not self.count:
            raise UserError(503, f"{call} without a backward", "call sharded.backward(loss) before", where=call)
        if not (self._reduced if summed is None else summed):
            do = "give the last one last=True, which reduces gradients"
            raise UserError(503, "the last backward of the step had last=False", do, where=call)

    def forget(self) -> None:
        """Forget the gradients of this step, and wait for reductions under way."""
        (stage,) = self.engine.stages
        stage.finish_reduction()
        for unit in self.engine.units:
            unit.gradients.drop()
        for group in self.assembly.tables.groups:
            group.forget()
        self.assembly.values.release_all()
        self.begin_step()


def run_backward(loss: Tensor, modules: Sequence[Backwards], *, last: bool) -> None:
    """Compute the gradients of a loss for some modules, and reduce them; see `sharded.backward`.

    The modules reduce one after the other, the last one first, whatever the order in which their gradients come.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        got += " without a graph" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        what = f"expected one number that depends on parameters, got {got}"
        raise UserError(505, what, "give the mean of the losses, outside of torch.no_grad()", where="backward")
    if not modules or not all(module.trains for module in modules):
        what = "a module that was sharded without an optimizer" if modules else "without a module"
        raise UserError(510, f"backward {what}", "name the modules that are trained", where="backward")
    first = modules[0].assembly
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
            (stage,) = module.engine.stages
            stage.reduction.follows, follows = follows, stage.reduction
            total.grad_fn.register_prehook(module.assembly.calls.begin_backward)
            begin = partial(module.run, begin, factor=factor)
        begin()
