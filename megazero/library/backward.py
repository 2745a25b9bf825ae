"""Run the backwards of a step, each of one module or of several that are in one graph."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.library.calls import Calls
from megazero.library.describe import loss_text
from megazero.library.following import following_of
from megazero.library.lockstep import Lockstep, in_lockstep
from megazero.library.tables import Tables
from megazero.zero.engine import Engine


class Backwards:
    """The backwards of a step of one module.

    Attributes:
        count: those of this step so far.
        reduced: the last one had last=True, or gradients rest in shards.
        frozen: the trained parameters that were frozen in all of them, by name.
    """

    def __init__(self, engine: Engine, calls: Calls, tables: Tables, lockstep: Lockstep):
        self.engine, self.calls, self.lockstep, self._tables = engine, calls, lockstep, tables
        self.trains = bool(engine.units or tables.trained)
        self._shards_gradients = any(not unit.gradients.rest_whole for unit in engine.units)
        self._one = torch.ones((), device=engine.loss_scale.scale.device)
        self._all_summed = self._failed = False
        self._begin_step()

    def _begin_step(self) -> None:
        self.engine.begin_step()
        self.count, self.reduced, self._failed = 0, False, False
        self.frozen: set[str] = set()

    def begin(self, loss: Tensor, *, last: bool) -> Tensor:
        """Prepare for the gradients of a loss; return the scaled loss."""
        sends = last or self._shards_gradients
        if sends:
            self.lockstep.meet("backward")
        else:
            self.lockstep.require_unchanged()
        (stage,) = self.engine.stages
        if self._failed:
            self.forget()
        if self.count:
            stage.finish_reduction()
            if self._all_summed and not self._shards_gradients:
                for unit in self.engine.units:
                    unit.gradients.keep_own()
                stage.clear()  # what is reduced next holds what was reduced before
        self._all_summed, self.reduced, self._failed = last, sends, True
        parts = self.calls.parts
        now = {shown.name for part in parts for shown in part.trained}
        now -= {shown.name for part in parts for shown in part.live}
        self.frozen = self.frozen & now if self.count else now
        self.count += 1
        return self.engine.loss(loss, self._one if self.count == 1 else self._one - 1)

    def run(self, begin: Callable[[], None], *, factor: Tensor | None) -> None:
        """Run autograd, `begin`, while gradients are taken.

        Args:
            factor: what they are multiplied by (`Calls`).
        """
        (stage,) = self.engine.stages
        with self.calls.backward(factor), self._tables.backward(factor):
            stage.backward(0, begin, reduce=self.reduced, last=False)
        self._failed = False

    def require_whole(self) -> None:
        """Refuse a step without gradients, or with some that have not been summed. Raises UserError 503, 510."""
        if not self.trains:
            raise UserError(510, "the module was sharded without an optimizer", "give shard one", where="step")
        if self._failed:
            raise UserError(503, "the last backward failed", "run the step's forward and backward again", where="step")
        if not self.count:
            raise UserError(503, "a step without a backward", "call sharded.backward(loss) before", where="step")
        if not self._all_summed:
            do = "give the last one last=True"
            raise UserError(503, "the last backward of the step had last=False", do, where="step")

    def require_reduced(self, call: str) -> None:
        """Refuse a look at gradients that are not there, or have not been summed. Raises UserError 503."""
        if not self.count:
            raise UserError(503, f"{call} without a backward", "call sharded.backward(loss) before", where=call)
        if not self.reduced:
            do = "gradients are reduced by the last one"
            raise UserError(503, "the last backward had last=False", do, where=call)

    def leave_frozen(self) -> None:
        """Let the update leave alone what was frozen in all backwards of the step."""
        following_of(self.engine).frozen = self.frozen

    def forget(self) -> None:
        """Forget the gradients of this step, also those that are under way."""
        (stage,) = self.engine.stages
        stage.finish_reduction()
        for unit in self.engine.units:
            unit.gradients.drop()
        self._tables.forget()
        self.calls.release_all()
        self.calls.close()
        self._begin_step()

    def next_step(self) -> None:
        """Begin the next step, after an update."""
        self.calls.next_step()
        self._begin_step()


def run_backward(loss: Tensor, modules: Sequence[Backwards], *, last: bool) -> None:
    """Compute the gradients of a loss for some modules, and reduce them; see `sharded.backward`.

    The modules reduce one after the other, the last one first, whatever the order in which their gradients come.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"expected one number that depends on parameters, got {loss_text(loss)}"
        raise UserError(505, what, "give the mean of the losses, outside of torch.no_grad()", where="backward")
    if not modules or not all(module.trains for module in modules):
        what = "a module that was sharded without an optimizer" if modules else "without a module"
        raise UserError(510, f"backward {what}", "name the modules that are trained", where="backward")
    with in_lockstep(modules[0].lockstep.rank), modules[0].calls.process.backward():
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
            total.grad_fn.register_prehook(module.calls.begin_backward)
            begin = partial(module.run, begin, factor=factor)
        begin()
