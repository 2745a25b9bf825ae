"""Run several operations, each with its own backward, as one autograd function.

Each autograd function in Python costs the host tens of microseconds, in forward and in backward. So a block, apart from
the core of attention, is two such functions (`block.py`), each made of several operations (norm, product, activation).
The operations of a function share a tape: in forward each one appends the values that its backward needs; in backward
each one pops them from the end. They are freed when the operation's backward returns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.kernels.reference import wide_dtype
from megazero.model.contract import GradientSlot

Owner = Mapping[str, Any]  # the parameters of a module by local name; one is "weight"


class Operation(Protocol):
    """An operation on tensors and parameters with its own backward.

    Attributes:
        run: (tape, *inputs) -> one or several tensors.
        back: (tape, *gradients of these) -> the gradient of the only input, or a tuple for all inputs; delivers the
            parameters' gradients.
        owners: one for each module whose parameters it uses: {local name: parameter}.
    """

    @property
    def run(self) -> Callable[..., Any]:
        """Return the forward."""
        ...

    @property
    def back(self) -> Callable[..., Any]:
        """Return the backward."""
        ...

    @property
    def owners(self) -> Sequence[Owner]:
        """Return one {local name: parameter} for each module whose parameters the operation uses."""
        ...


class Tape:
    """Stack of the values that operations keep from forward to backward, which pops them in reverse order.

    Args:
        operation: the operation that runs as one autograd function.
        training: a backward will follow; False: keep nothing and announce no use of a parameter.

    Attributes:
        operation, training: the arguments.
        parameters: the parameters that are inputs of the autograd function.
        weights: parameters that backward reads. From forward to backward autograd keeps them as saved tensors, whose
            hooks may replace them: a sharded parameter has other memory by then (`zero/hooks.py`).
        returned: gradients of parameters without an engine, by the parameter's id.
    """

    __slots__ = ("_kept", "operation", "parameters", "returned", "training", "weights")

    def __init__(self, operation: Operation, training: bool):
        self.operation, self.training = operation, training
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.weights: list[Tensor] = []
        self.returned: dict[int, ReturnedGradient] = {}
        self._kept: list[tuple[Any, ...]] = []

    def use(self, parameter: nn.Parameter | None) -> "GradientSlot | None":
        """Return the slot to which this use of a parameter delivers its gradient; None if `parameter` is None.

        In training the slot counts the use, and waits for one more gradient.
        """
        if parameter is None:
            return None
        slot: GradientSlot | None = getattr(parameter, "gradient_slot", None)
        if slot is None:
            return self.returned.setdefault(id(parameter), ReturnedGradient(parameter))
        if self.training:
            slot.expect()
        return slot

    def keep(self, kept: tuple[Any, ...], *weights: Tensor) -> None:
        """Push what one operation's backward needs. It pops `kept` by `take`, and the weights off `self.weights`."""
        if self.training:
            self._kept.append(kept)
            for weight in weights:
                self.weights.append(weight.detach())  # a leaf would have to be an input of the autograd function

    def take(self) -> tuple[Any, ...]:
        """Pop the values of the last operation whose backward has not run yet."""
        return self._kept.pop()


class ReturnedGradient:
    """The gradient slot of a parameter without an engine: its gradient is returned to autograd."""

    def __init__(self, parameter: nn.Parameter):
        self._shape, self._dtype = parameter.shape, parameter.dtype
        self.gradient: Tensor | None = None

    def expect(self) -> None:
        """Do nothing: uses are not counted without an engine."""

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape."""
        gradient = gradient.to(self._dtype)
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def add_sum(self, rows: Tensor) -> None:
        """Add the sum of rows."""
        self.add(rows.sum(0, dtype=wide_dtype(rows.dtype)))

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a product."""
        self.add(left @ right)

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add values to some rows."""
        self.add(values.new_zeros(self._shape).index_add_(0, rows, values))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, *tensors: Any) -> Any:
        result = tape.operation.run(tape, *tensors[: len(tensors) - len(tape.parameters)])
        ctx.save_for_backward(*tape.weights)
        tape.weights.clear()
        ctx.tape = tape
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tape: Tape = ctx.tape
        tape.weights += ctx.saved_tensors
        gradients = tape.operation.back(tape, *grads)
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        if not tape.parameters:
            return None, *gradients
        returned = [tape.returned.get(id(parameter)) for parameter in tape.parameters]
        return None, *gradients, *(None if slot is None else slot.gradient for slot in returned)


# torch's own function without its check for functorch, which takes microseconds of every call.
_apply: Callable[..., Any] = getattr(super(torch.autograd.Function, _Function), "apply")  # noqa: B009


def apply(operation: Operation, *inputs: Any) -> Any:
    """Run an operation; return its result. If gradients are enabled, run it as an autograd function.

    Args:
        inputs: the first one is a tensor.
    """
    tape = Tape(operation, torch.is_grad_enabled())
    if not tape.training:
        return operation.run(tape, *inputs)
    # If the input is in the graph already and gradients go to slots, parameters need not be inputs for autograd.
    if not (inputs[0].requires_grad and hasattr(operation.owners[0]["weight"], "gradient_slot")):
        every = (parameter for owner in operation.owners for parameter in owner.values())
        tape.parameters = tuple(parameter for parameter in every if parameter is not None)
    return _apply(tape, *inputs, *tape.parameters)
