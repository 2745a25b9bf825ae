"""Run the parts of a module: gather their parameters, show them to the module, collect gradients, release them.

A call of a part runs its module's own forward between two steps:

    before    its units are gathered (`values.py`), and the module's attributes refer to the gathered values
    after     the attributes refer to the parameters again, and sharded units are released (the root's after backward)

If gradients are needed, the parameters of a call are the outputs of one autograd function (`_Parameters`). Its backward
runs once, after autograd has summed the gradients of every use of every parameter in that call. The module may use a
parameter once, several times or not at all. The gradients are then written into the units' buffers, and a unit can be
reduced once all of its calls have delivered their gradients. `.grad` stays empty.

If autograd saves a parameter of a sharded unit, backward looks up its values again (`shown.py`). A part is gathered
when the gradient of one of its outputs arrives: checkpointed code inside the part then runs again, and finds the
parameters themselves, with the gathered values. An embedding is not gathered: its backward reads no weights.

A parameter that is frozen when its part is called is a constant in that call. A backward that trains other modules may
pass through this one; it then gathers this module's parts and drops their gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.library.parts import Member, Part
from megazero.library.shown import Forward, hide, prepare, put, saving, tensors_in
from megazero.library.values import Values
from megazero.zero.saved import before_backward
from megazero.zero.unit import Unit


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Call:
    """One call of a part whose backward is still to come.

    Attributes:
        before: the part whose call ended last before this one began: its backward comes next.
        epoch: the epoch of the values that it has used (`Values`).
        members: the parameters that are not frozen.
    """

    calls: "Calls"
    part: Part
    before: Part | None
    epoch: int
    members: list[Member]

    def begin_backward(self, _: object = None) -> None:
        """Gather the part at the start of its backward; prefetch the part whose backward comes next.

        A part is released when its gradients have arrived; one without gradients, when the next part's backward begins.
        """
        self.require_fresh()
        self.calls.join()
        if (self.calls.in_backward or not self.members) and not self.part.here:
            if self.calls.held not in (None, self.part):
                self.calls.values.release([self.calls.held])
            self.calls.held = None if self.members else self.part
            self.calls.values.unshard(self.part)
            if self.before is not None:
                self.calls.values.prefetch(self.before)

    def need(self, unit: Unit) -> None:
        """Gather a unit that backward needs."""
        self.begin_backward()
        if unit.parameters.whole is None:  # of another part, whose parameter this one has saved
            self.calls.values.gather.unshard([unit])

    def deliver(self, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of the part's trained parameters into its units; None for an unused one.

        Raises:
            UserError: 506, no backward of `Sharded` runs, the values are stale, or the part has been reduced.
        """
        self.require_fresh()
        calls, part = self.calls, self.part
        calls.join()
        if not calls.in_backward:
            do = "call sharded.backward(loss), which reduces gradients too"
            raise UserError(506, "loss.backward() was called", do)
        if part in calls.reduced:
            do = "if an activation checkpoint calls it several times, use checkpoint(..., use_reentrant=False)"
            raise UserError(506, f"{part.name} got more gradients after its gradients had been reduced", do)
        if all(call is self for call in part.open):
            calls.release_trained(part, gradients)
        live = set(part.live)
        for member, gradient in zip(self.members, gradients, strict=True):
            if gradient is not None and member in live:
                calls.take(member, gradient)
        part.open.discard(self)
        calls.complete(part)

    def require_fresh(self) -> None:
        """Refuse the graph of an earlier step, or of other values. Raises UserError 506."""
        if self.epoch != self.calls.values.epoch:
            what = f"{self.part.name}: backward of a forward that ran before the last step or change of values"
            raise UserError(506, what, "run forward and backward between two steps")


class _Parameters(torch.autograd.Function):
    """Show a call's parameters to autograd; their gradients come back together, each summed over all its uses."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(member.values for member in call.members)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        if torch.is_grad_enabled():
            do = "leave create_graph out: sharded parameters have no second derivatives"
            raise UserError(505, "gradients of gradients were requested (create_graph=True)", do)
        ctx.call.deliver(gradients)
        return None, None


class Calls:
    """The calls of all parts of a module.

    Args:
        values: the values of the module's units.

    Attributes:
        in_backward: whether a backward runs that trains the module, or passes through it.
        trains: whether that backward trains the module.
        held: a part without gradients that backward keeps gathered until it gathers the next one; or None.
        factor: multiplies gradients if the backward has another loss scale than the module; else None.
        reduced: the parts whose reduction has begun in this backward.
        on_thaw: called when frozen parameters have been unfrozen.
    """

    def __init__(self, values: Values):
        self.values = values
        self.in_backward = self.trains = False
        self.factor: Tensor | None = None
        self.reduced: set[Part] = set()
        self.on_thaw: Callable[[], object] = lambda: None
        self._anchor = torch.zeros((), requires_grad=True, device=values.device)
        self.held: Part | None = None
        self._task = -1  # autograd's id of the backward
        self._sharded = any(part.sharded for part in values.parts)
        for part in values.parts:
            prepare(part, self.run, self.stray)

    def run(self, part: Part, forward: Forward, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the forward of a part, with the steps before and after it."""
        if part.running:  # a recursive call: its parameters are shown already
            return forward(*arguments, **named)
        values, wants = self.values, torch.is_grad_enabled()
        if values.lent is not None:
            raise UserError(502, "the module was called inside of `gathered`", "leave that context first")
        self.join()
        self.follow()
        values.begin(part, forward=not self.in_backward)
        call = _Call(self, part, None if self.in_backward else values.ended, values.epoch, part.live) if wants else None
        part.running, keeps = True, False
        try:
            self._show(part, call)
            with saving(call.need, values.storages) if self._sharded and call is not None else nullcontext():
                outputs = forward(*arguments, **named)
            if call is not None and part.sharded and not part.root and not part.looks_up:
                for x in tensors_in(outputs):
                    before_backward(x, call.begin_backward)
            # A part that returns its own parameter, or a view of it, stays gathered: the caller may read it.
            given = (x for x in tensors_in(outputs) if part.sharded and x.layout == torch.strided)
            keeps = any(values.storages.get(x.untyped_storage()._cdata) in part.units for x in given)
            return outputs
        finally:
            part.running = False
            hide(part)
            if not self.in_backward:
                values.end(part, graph=wants, keeps=keeps)

    def follow(self) -> None:
        """Call `on_thaw` if frozen parameters have been unfrozen, unless a forward or backward runs."""
        parts = self.values.parts
        idle = not self.values.process.in_backward and not any(part.running for part in parts)
        if idle and any(part.thawed for part in parts):
            self.on_thaw()

    def _show(self, part: Part, call: _Call | None) -> None:
        """Put a part's parameters where its module looks for them; if call is None, as constants without gradients."""
        live = set() if call is None else set(call.members)
        if call is not None and live:
            if not (self.in_backward and part.open):  # else a checkpoint repeats a call that is still open
                part.open.add(call)
            for member, value in zip(call.members, _Parameters.apply(call, self._anchor), strict=True):
                put(member, value)
        for member in part.members:
            if member not in live:
                put(member, member.values)

    def release_trained(self, part: Part, gradients: Sequence[Tensor | None]) -> None:
        """Free the values of trained parameters whose gradients have arrived, so that gradients can use the memory."""
        if not part.sharded or part.running:
            return
        units = [unit for unit in part.units if unit.trainable]
        values = {unit.parameters.whole.untyped_storage()._cdata for unit in units if unit.parameters.whole is not None}
        given = (x for x in gradients if x is not None and x.layout == torch.strided)
        if values.isdisjoint(x.untyped_storage()._cdata for x in given):  # else a gradient is a parameter's own values
            self.values.release_units(units)

    def complete(self, part: Part) -> None:
        """Mark a part's gradients as ready to be reduced, unless more of them will arrive in this backward."""
        if part.strays or part.open:
            return
        if not part.root:
            self.values.release([part])
        if self.trains:
            self.reduced.add(part)
            for unit in part.units:
                if unit.trainable:
                    unit.gradients.deliveries.on_complete()

    def take(self, member: Member, gradient: Tensor) -> None:
        """Write a gradient into its unit's buffer, or add it to earlier ones; drop it if only other modules train."""
        if not self.trains:
            return
        if self.factor is not None:
            gradient = gradient * self.factor
        slot = member.unit.gradients.views[member.name]
        if gradient.layout == torch.sparse_coo:  # only from embeddings
            slot.write_rows(gradient._indices()[0], gradient._values())
        else:
            slot.write(gradient)

    def begin_backward(self, _: object = None) -> None:
        """Count the gradients that will reach parameters themselves; expect none for units that are frozen."""
        self._task = torch._C._current_graph_task_id()
        for part in self.values.parts:
            part.strays = sum(map(torch._C._will_engine_execute_node, part.nodes))
            live = {member.unit for member in part.live}
            for unit in part.units:
                if unit.trainable and unit not in live:
                    unit.gradients.deliveries.on_complete()

    @contextmanager
    def backward(self, factor: Tensor | None) -> Iterator[None]:
        """Collect gradients in this context, in which a backward trains the module; if it fails, close all calls.

        Args:
            factor: see `Calls`.
        """
        self.trains, self.factor = True, factor
        self._enter()
        try:
            yield
        except BaseException:
            self.values.expect_no_backward()
            raise
        finally:
            self.leave()

    def join(self) -> None:
        """Take part in a backward that trains other modules and has reached this one."""
        if self.values.process.in_backward and not self.in_backward:
            self.trains = False
            self._enter()
            self.values.process.passed.append(self.leave)

    def _enter(self) -> None:
        self.in_backward = True
        self.reduced.clear()
        for part in self.values.parts:
            part.strays = 0

    def leave(self) -> None:
        """End a backward: free the values that it has gathered."""
        values = self.values
        self.in_backward = False
        values.ended = values.called = self.held = None
        values.release(values.parts)
        values.storages.clear()

    def stray(self, part: Part, member: Member, parameter: nn.Parameter) -> None:
        """Take a gradient that reached a parameter itself, which was not used through a call of its part.

        A checkpoint that runs backward inside a part's backward causes that, and so does a penalty on weights that
        are not sharded.

        Raises:
            UserError: 506, the part's gradients have been reduced, or its values were not gathered.
        """
        gradient, parameter.grad = parameter.grad, None
        self.join()
        if self.in_backward and not self.trains:
            return
        there = gradient is not None and gradient.shape == member.shape
        if gradient is None or not there or not self.in_backward or part in self.reduced:
            what = f"{member.name} was used outside of the forward of its submodule"
            raise UserError(506, what, "use it within the module's forward; its values are in sharded.gathered()")
        self.take(member, gradient)
        if torch._C._current_graph_task_id() == self._task:  # else a checkpoint's own backward
            part.strays -= 1
            self.complete(part)
