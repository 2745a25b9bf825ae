"""Count the gradients delivered to a unit, to know when the last one has arrived; accumulate them in its buffer.

Each use of a parameter in forward is announced (`expect`), and each announced use delivers one gradient in backward.
When as many gradients have been delivered as were announced, for all parameters of a unit and one micro-batch, the
unit's gradients are complete. Nothing simpler works: a unit with integer input (the embedding) gets no gradient of its
input; a tied weight's two gradients arrive at the beginning and at the end of backward; and if weight gradients are
computed separately (`stage.py`), none arrives while the input gradient is computed.

The deliveries to each unit in each micro-batch are counted separately, so that a gradient that arrives too late or too
early is an error that names the parameter, and not a wrong sum.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.kernels.operations import Operations
from megazero.kernels.reference import wide_dtype


@dataclass
class Deliveries:
    """The deliveries of one micro-batch to a unit.

    Attributes:
        due: the deliveries still to come, by parameter.
        left: their sum.
    """

    due: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    left: int = 0


class DeliveryCounter:
    """A counter of the gradients delivered to one unit, for each micro-batch.

    Attributes:
        micro_batch: the micro-batch whose uses are announced, or whose gradients are delivered, now.
        on_complete: called when the last gradient of a micro-batch has arrived.
        deferred: receives deliveries as functions to be called later, while backward computes the gradient of the
            input only; None: deliveries are made at once.
    """

    def __init__(self, unit: str):
        self._unit = unit
        self._by_micro_batch: defaultdict[int, Deliveries] = defaultdict(Deliveries)
        self._delivered: set[str] = set()
        self.micro_batch = 0
        self.on_complete: Callable[[], object] = lambda: None
        self.deferred: deque[Callable[[], None]] | None = None

    def expect(self, parameter: str) -> None:
        """Announce a use of a parameter in forward, or in a forward that is recomputed."""
        deliveries = self._by_micro_batch[self.micro_batch]
        assert deliveries.left or not deliveries.due, f"{parameter} is used after the backward of {self._now}"
        deliveries.due[parameter] += 1
        deliveries.left += 1

    def delivered(self, parameter: str) -> None:
        """Count a gradient that has been added to the buffer; call `on_complete` after the last one."""
        deliveries = self._by_micro_batch.get(self.micro_batch)
        assert deliveries is not None and deliveries.due[parameter], f"no gradient of {parameter} is due in {self._now}"
        self._delivered.add(parameter)
        deliveries.due[parameter] -= 1
        deliveries.left -= 1
        if deliveries.left == 0:
            self.on_complete()

    def require(self, parameters: Iterable[str]) -> None:
        """Raise an error if a parameter has had no gradient in this step.

        Raises:
            UserError: 305.
        """
        if lacking := [name for name in parameters if name not in self._delivered]:
            more = f" ({len(lacking) - 1} more of unit {self._unit})" if len(lacking) > 1 else ""
            do = "check that its layer announces each use and delivers the gradient (model/contract.py)"
            raise UserError(305, f"expected a gradient of {lacking[0]} in each step, got none{more}", do)

    def end(self) -> None:
        """Forget the current micro-batch: its backward is over."""
        self._by_micro_batch.pop(self.micro_batch, None)

    def clear(self) -> None:
        """Forget all deliveries of the step and all micro-batches, including those whose forward had no backward."""
        self._by_micro_batch.clear()
        self._delivered.clear()

    @property
    def _now(self) -> str:
        return f"micro-batch {self.micro_batch} of unit {self._unit}"


class GradientAccumulator:
    """The gradient of one parameter inside its unit's flat buffer (a `GradientSlot` of the model).

    The first delivery overwrites what the memory held, later ones (the next micro-batch, the other use of a tied
    weight) add to it: the buffer is never zeroed in a pass of its own. If the buffer is wider than the parameter (fp32
    for a 16-bit parameter), a gradient is computed in the narrow dtype and widened as it is delivered, in one pass; a
    matrix product is computed in the wide dtype if the device has a kernel for this (`kernels/products.py`).

    Args:
        open: makes sure that there is memory for the gradient, and that `view` is in it.

    Attributes:
        view: of the parameter's shape, in the unit's buffer.
        fresh: nothing has been delivered since the last reduction, so the memory is undefined.
    """

    def __init__(self, counter: DeliveryCounter, name: str, ops: Operations, open: Callable[[], None]):
        self.name, self._ops, self.open = name, ops, open
        self.view: Tensor = torch.empty(0)
        self.fresh = True
        self.count_with(counter)

    def count_with(self, counter: DeliveryCounter) -> None:
        """Use this counter for uses and deliveries from now on."""
        self.counter = counter
        self.expect: Callable[[], None] = partial(counter.expect, self.name)  # announces a use in forward

    def add(self, gradient: Tensor) -> None:
        """Deliver a gradient of the parameter's shape."""
        self._deliver(self.write, gradient)

    def add_sum(self, rows: Tensor) -> None:
        """Deliver `rows` summed over dim 0; in one pass if the buffer has the sum's dtype."""
        if self.counter.deferred is None and rows.dim() == 2:
            self.open()
            if self.view.dtype.itemsize > 2:
                self._ops.sum_rows_(self.view, rows, not self.fresh)
                self.fresh = False
                self.counter.delivered(self.name)
                return
        sums = rows.new_empty(rows.shape[1:], dtype=wide_dtype(rows.dtype))
        self._ops.sum_rows_(sums, rows.flatten(1), False)
        self.add(sums)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Deliver the gradient left @ right."""
        self._deliver(self.write_product, left, right)

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Deliver a gradient that is zero except for some rows: row `rows[i]` gets `values[i]`; rows may repeat."""
        self._deliver(self.write_rows, rows, values)

    def close(self) -> None:
        """Write zeros if nothing has been delivered."""
        if self.fresh:
            self.view.zero_()
            self.fresh = False

    def _deliver(self, write: Callable[..., None], *tensors: Tensor) -> None:
        """Call write(*tensors) and count a delivery, now or, if deliveries are deferred, later."""
        if (deferred := self.counter.deferred) is None:
            self._deliver_now(write, *tensors)
        else:  # the tensors themselves would hold the graph
            deferred.append(partial(self._deliver_now, write, *(tensor.detach() for tensor in tensors)))

    def _deliver_now(self, write: Callable[..., None], *tensors: Tensor) -> None:
        write(*tensors)
        self.counter.delivered(self.name)

    def write(self, gradient: Tensor) -> None:
        """Write a gradient of the parameter's shape, which may be wider than the buffer, or add it to earlier ones."""
        self.open()
        view, wider = self.view, self.view.dtype.itemsize > gradient.dtype.itemsize
        if self.fresh:
            self._ops.cast_(view, gradient.contiguous()) if wider else view.copy_(gradient)
            self.fresh = False
        else:
            self._ops.accumulate_(view, gradient.contiguous()) if wider else view.add_(gradient)

    def write_product(self, left: Tensor, right: Tensor) -> None:
        """Write the gradient left @ right, or add it to earlier ones."""
        self.open()
        view = self.view
        if left.dtype == view.dtype:
            torch.mm(left, right, out=view) if self.fresh else view.addmm_(left, right)
        elif (wide := self._ops.wide_products) is not None:
            (wide.write if self.fresh else wide.add)(view, left, right)
        else:
            self.write(left @ right)
        self.fresh = False

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add values[i] to row rows[i], after zeroing the gradient if it is the first."""
        self.open()
        if self.fresh:
            self.view.zero_()
            self.fresh = False
        self._ops.add_rows_(self.view, rows, values)
