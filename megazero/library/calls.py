"""Run the parts of a module: gather their parameters, show them to the module, take their gradients, release.

A call of a part runs its module's own forward between two events:

    before    its units are gathered, and the parameters take the places where the module looks for them
    after     the places are given back, and sharded units are released (the root's stay until the backward is over)

Where gradients are wanted, the parameters of a call are the outputs of one function of autograd (`_Parameters`). Its
backward runs once, when the gradients of all uses of all of them in that call have been summed by autograd: of
parameters used once, several times or not at all, whatever the module does inside. They are written into the units'
buffers then, and a unit whose calls have all had their gradients can be reduced. `.grad` stays empty.

What autograd saves of a sharded unit's parameters is looked up again in backward (`saved.py`). A part is gathered when
the gradient of one of its outputs arrives: what is checkpointed inside of it runs again then, and finds the parameters
themselves, which have the gathered values. Only an embedding needs nothing of itself in backward.

Every rank has to gather the same units in the same order. Each keeps a number made of its own order (`Process.order`),
which calls of `Sharded` compare.

A parameter that is frozen when its part is called is a constant there. A backward that trains other modules may come
through this one, which gathers its parts and drops their gradients.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.library.built import BuiltPart, Forward, Shown, hide, prepare, put, tensors_in
from megazero.library.process import Process
from megazero.library.saved import saving
from megazero.zero.gather import Gather
from megazero.zero.saved import before_backward
from megazero.zero.unit import Unit


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a part whose backward is still to come.

    Attributes:
        before: the part that ended last before this one began: its backward comes next.
        step: the number of the step it belongs to.
        counted: it is one of its part's open calls. One that a checkpoint repeats in backward is not: the first one,
            whose backward that is, stands for it.
        shown: the parameters that are not frozen.
    """

    calls: "Calls"
    part: BuiltPart
    before: BuiltPart | None
    step: int
    counted: bool
    shown: list[Shown]

    def begin_backward(self, _: object = None) -> None:
        """Gather the part, whose backward begins; prefetch the one whose backward comes next."""
        self.calls.require_step(self)
        self.calls.join()
        if (self.calls.in_backward or not self.shown) and any(
            unit.parameters.whole is None for unit in self.part.units
        ):
            self.calls.gather_for_backward(self.part, keeps=bool(self.shown))
            if self.before is not None:
                self.calls.prefetch(self.before)

    def need(self, unit: Unit) -> None:
        """Gather a unit that backward needs."""
        self.begin_backward()
        if unit.parameters.whole is None:  # of another part, of which this one has saved something
            self.calls.gather.unshard([unit])

    def deliver(self, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of the part's trained parameters into its units; None: there was no use of one."""
        self.calls.require_backward(self)
        part = self.part
        if part in self.calls.reduced:
            do = "checkpoint what calls it several times with use_reentrant=False"
            raise UserError(506, f"{part.part.name} got gradients after they had been reduced", do)
        if part.open == self.counted:
            self.calls.release_trained(part, gradients)
        live = {shown.name for shown in part.live}
        for shown, gradient in zip(self.shown, gradients, strict=True):
            if gradient is not None and shown.name in live:
                self.calls.take(shown, gradient)
        part.open -= self.counted
        if part.strays == part.open == 0:
            self.calls.complete(part)


class _Parameters(torch.autograd.Function):
    """Show a call's parameters to autograd; their gradients come back together, each summed over all its uses."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(shown.values for shown in call.shown)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        if torch.is_grad_enabled():
            do = "leave create_graph out: gradients of gradients are not sharded"
            raise UserError(505, "a second backward through the parameters was asked for", do)
        ctx.call.deliver(gradients)
        return None, None


class Calls:
    """The calls of all parts of a module.

    Args:
        parts: of the module; the root, if it has parameters of its own, is among them.
        gather: of their units.
        process: the other modules.
        lockstep: all ranks gather the same units in the same order.

    Attributes:
        step: the number of steps done; the graph of an earlier one has parameters that are gone.
        in_backward: a backward runs that trains the module, or comes through it.
        trains: it trains the module.
        on_thaw: called when parameters that were frozen are not any more.
        factor: what gradients are multiplied by, where a backward has another loss scale than the module; else None.
        reduced: the parts whose reduction has begun in this backward.
        lent: the names of parameters whose whole values are looked at: nothing may be gathered or released; else None.
    """

    def __init__(self, parts: list[BuiltPart], gather: Gather, process: Process, *, lockstep: bool):
        self.parts, self.gather, self.process, self._lockstep = parts, gather, process, lockstep
        self._number, self.step = process.modules, 0
        self.in_backward = self.trains = False
        self.lent: Collection[str] | None = None
        self.factor: Tensor | None = None
        self.on_thaw: Callable[[], object] = lambda: None
        self._last: BuiltPart | None = None  # that ended last
        self._running: BuiltPart | None = None  # the part that was called last
        self._anchor: Tensor | None = None
        self._storages: dict[int, Unit] = {}  # of sharded units that are whole now
        self._held: BuiltPart | None = None  # a part without gradients that backward has gathered
        self._task = -1  # autograd's number of the backward
        self.reduced: set[BuiltPart] = set()
        self._sharded = any(part.sharded for part in parts)
        for part in parts:
            prepare(part, self.run, self.stray)

    def run(self, part: BuiltPart, forward: Forward, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the forward of a part between its two events."""
        if part.depth:  # called by itself: its parameters are there
            return forward(*arguments, **named)
        if self.lent is not None:
            raise UserError(502, "the module was called inside of `gathered`", "leave that context first")
        wants = torch.is_grad_enabled()
        self.join()
        if not self.in_backward and not any(one.depth for one in self.parts):
            self.follow()
        self._begin(part)
        call: _Call | None = None
        if wants:
            live = part.live
            counted = bool(live) and not (self.in_backward and part.open)
            call = _Call(self, part, None if self.in_backward else self._last, self.step, counted, live)
        part.depth, keeps = 1, part.root and wants
        try:
            self._show(part, call)
            with saving(call.need, self._storages) if self._sharded and call is not None else nullcontext():
                outputs = forward(*arguments, **named)
            if call is not None and part.sharded and not part.root and not part.looks_up:
                for x in tensors_in(outputs):
                    before_backward(x, call.begin_backward)
            # What gives its own parameter away, or a view of it, has to stay as long as somebody may look at it.
            keeps = keeps or (part.sharded and any(self._unit_of(x) in part.units for x in tensors_in(outputs)))
            return outputs
        finally:
            part.depth = 0
            hide(part)
            if call is not None and not part.root and not self.in_backward:
                self._last = part
            self._end(part, wants=wants, keeps=keeps)

    def follow(self) -> None:
        """See whether parameters that were frozen are not any more."""
        if any(part.thawed for part in self.parts):
            self.release_all()
            self.on_thaw()

    def _begin(self, part: BuiltPart) -> None:
        """Gather a part that is about to run, and prefetch the one that ran after it last time."""
        if not part.sharded:
            return
        if any(unit.parameters.whole is None for unit in part.units):
            self.gathered(part)
            self.gather.unshard(part.units)
        if self._running is not None and not self.in_backward:
            self._running.after = part
        self._running = part
        for unit in part.units:
            if unit.parameters.whole is not None:
                self._storages[unit.parameters.whole.untyped_storage()._cdata] = unit
        if part.after is not None and part.after is not part and not self.in_backward:
            self.prefetch(part.after)

    def prefetch(self, part: BuiltPart) -> None:
        """Start to gather a part that will be needed soon."""
        if part.sharded and any(unit.parameters.whole is None for unit in part.units):
            self.gather.prefetch(part.units)

    def gather_for_backward(self, part: BuiltPart, *, keeps: bool) -> None:
        """Gather a part whose backward begins; it is released when its gradients have come, or when the next begins.

        Args:
            keeps: gradients will come.
        """
        if self._held not in (None, part):
            self.release([self._held])
        self._held = None if keeps else part
        self.gathered(part)
        self.gather.unshard(part.units)

    def gathered(self, part: BuiltPart) -> None:
        """Note that a part is gathered now."""
        if self._lockstep:
            self.process.order = zlib.crc32(b"%d %d" % (self._number, part.number), self.process.order)

    def _show(self, part: BuiltPart, call: _Call | None) -> None:
        """Put a part's parameters where its module looks for them."""
        live = set() if call is None else set(call.shown)
        if call is not None and live:
            if self._anchor is None:
                self._anchor = torch.zeros((), requires_grad=True, device=part.units[0].device)
            part.open += call.counted
            for shown, value in zip(call.shown, _Parameters.apply(call, self._anchor), strict=True):
                put(shown, value)
        for shown in part.shown:
            if shown not in live:
                put(shown, shown.values)

    def _unit_of(self, x: Tensor) -> Unit | None:
        """Return the sharded unit in whose gathered parameters a tensor is."""
        return self._storages.get(x.untyped_storage()._cdata) if x.layout == torch.strided else None

    def _end(self, part: BuiltPart, *, wants: bool, keeps: bool) -> None:
        """Release a part that has run, unless it is kept, or its backward is under way."""
        if part.sharded and not self.in_backward and not keeps:
            self.release([part])
        if part.root and not wants and not self.in_backward:
            self.release(self.parts)
        if part.root:
            self._running = None

    def release(self, parts: Sequence[BuiltPart]) -> None:
        """Free the gathered parameters of some parts, except those that are running."""
        for part in parts:
            if part.sharded and not part.depth:
                self._release(part.units)

    def release_trained(self, part: BuiltPart, gradients: Sequence[Tensor | None]) -> None:
        """Free the values of trained parameters whose gradients have come, which then may have their memory."""
        if not part.sharded or part.depth:
            return
        units = [unit for unit in part.units if unit.trainable]
        values = {unit.parameters.whole.untyped_storage()._cdata for unit in units if unit.parameters.whole is not None}
        given = (x for x in gradients if x is not None and x.layout == torch.strided)
        if values.isdisjoint(x.untyped_storage()._cdata for x in given):  # else a gradient is a parameter's own values
            self._release(units)

    def _release(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.parameters.whole is not None and not unit.parameters.rest_whole:
                self._storages.pop(unit.parameters.whole.untyped_storage()._cdata, None)
        self.gather.reshard(units)

    def release_all(self) -> None:
        """Free all gathered parameters, and end what is on its way: an update will make them others."""
        self.gather.reshard_all([unit for part in self.parts for unit in part.units])
        self._storages.clear()
        self._running = self._last = None

    def complete(self, part: BuiltPart) -> None:
        """Let a part's gradients be reduced: no backward of it is to come."""
        if not part.root:
            self.release([part])
        if self.trains:
            self.reduced.add(part)
            for unit in part.units:
                if unit.trainable:
                    unit.gradients.deliveries.on_complete()

    def take(self, shown: Shown, gradient: Tensor) -> None:
        """Write a gradient into its unit's buffer, or add it to those before; drop it if others are trained."""
        if not self.trains:
            return
        if self.factor is not None:
            gradient = gradient * self.factor
        slot = shown.unit.gradients.views[shown.name]
        if gradient.layout == torch.sparse_coo:  # of an embedding alone
            slot.write_rows(gradient._indices()[0], gradient._values())
        else:
            slot.write(gradient)

    def begin_backward(self, _: object = None) -> None:
        """Count the gradients to come to parameters themselves, and wait for none of units that are frozen."""
        self._task = torch._C._current_graph_task_id()
        for part in self.parts:
            part.strays = sum(map(torch._C._will_engine_execute_node, part.nodes))
            live = {shown.unit for shown in part.live}
            for unit in part.units:
                if unit.trainable and unit not in live:
                    unit.gradients.deliveries.on_complete()

    @contextmanager
    def backward(self, factor: Tensor | None) -> Iterator[None]:
        """Be around a backward that trains the module.

        Args:
            factor: see `Calls`.
        """
        self.trains, self.factor = True, factor
        self._enter()
        try:
            yield
        finally:
            self.leave()

    def join(self) -> None:
        """Take part in a backward that trains other modules, and has come to this one."""
        if self.process.in_backward and not self.in_backward:
            self.trains = False
            self._enter()
            self.process.passed.append(self)

    def _enter(self) -> None:
        self.in_backward = True
        self.reduced.clear()
        for part in self.parts:
            part.strays = 0

    def leave(self) -> None:
        """Free what a backward has needed."""
        self.in_backward = False
        self._last = self._running = self._held = None
        self.release(self.parts)
        self._storages.clear()

    def stray(self, part: BuiltPart, shown: Shown, parameter: nn.Parameter) -> None:
        """Take a gradient that came to a parameter itself, which was used while it was not shown.

        A checkpoint that runs backward inside of a part's backward does that, and so does a penalty on weights that
        rest whole.

        Raises:
            UserError: 506, the part's gradients have been reduced, or its values were not there.
        """
        gradient, parameter.grad = parameter.grad, None
        self.join()
        if self.in_backward and not self.trains:
            return
        if gradient is None or not self.in_backward or part in self.reduced or gradient.numel() != shown.numel:
            what = f"{shown.name} was used outside of the forward of its submodule"
            raise UserError(506, what, "use it within the module's forward; its values are in sharded.gathered()")
        self.take(shown, gradient)
        if torch._C._current_graph_task_id() == self._task:  # else a checkpoint's own backward
            part.strays -= 1
            if part.strays == part.open == 0:
                self.complete(part)

    def next_step(self) -> None:
        """Begin the next step: parameters that rest whole have their new values."""
        self.void()
        self.gather.unshard([unit for part in self.parts for unit in part.units if unit.parameters.rest_whole])

    def void(self) -> None:
        """Let no graph of what has run have a backward: parameters have other values now."""
        self.step += 1
        self.close()

    def close(self) -> None:
        """Expect no backward of what has run in this step."""
        for part in self.parts:
            part.open = 0

    def require_step(self, call: _Call) -> None:
        """Refuse the graph of an earlier step, or of other values. Raises UserError 506."""
        if call.step != self.step:
            what = f"{call.part.part.name}: backward of a forward that ran before the last step, or change of values"
            raise UserError(506, what, "run forward and backward between two steps")

    def require_backward(self, call: _Call) -> None:
        """Refuse a backward that nobody reduces. Raises UserError 506."""
        self.require_step(call)
        self.join()
        if not self.in_backward:
            do = "call sharded.backward(loss), which reduces gradients too"
            raise UserError(506, "loss.backward() was called", do)
