"""Run operations that have a backward of their own, several of them as one function of autograd.

Every function of autograd that is written in Python costs the host tens of microseconds, on the way there and back. So
a block, apart from the core of attention, is two such functions (`block.py`), each made of several operations
(norm, product, activation). They share a tape: in forward each puts down what its backward needs, in backward each
takes it from the end again. What has been taken is freed when its operation's backward is over.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.model.contract import GradientSlot

Owner = Mapping[str, Any]  # the parameters of a module, by their names in it: one is its "weight"


class Operation(Protocol):
    """Compute something from tensors and parameters, with a backward of its own.

    Attributes:
        run: (tape, *inputs) -> a tensor or several.
        back: (tape, *gradients of these) -> the gradient of the one input, or those of all; delivers the parameters'.
        owners: of all parameters that it uses.
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
        """Return the owners of all parameters."""
        ...


class Tape:
    """Keep what operations need from their forward to their backward, which takes it in the reverse order.

    Args:
        training: there will be a backward; otherwise nothing is kept, and no use of a parameter is announced.

    Attributes:
        operation: what runs on it as a function of autograd.
        parameters: those that autograd knows of.
        weights: parameters that backward reads. Between the two they are with autograd, whose hooks may replace them:
            the memory of a sharded one is another by then (`zero/hooks.py`).
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
        """Announce one use of a parameter; return the slot for the one gradient of this use, None of no parameter."""
        if parameter is None:
            return None
        slot: GradientSlot | None = getattr(parameter, "gradient_slot", None)
        if slot is None:
            return self.returned.setdefault(id(parameter), ReturnedGradient(parameter))
        if self.training:
            slot.expect()
        return slot

    def keep(self, kept: tuple[Any, ...], *weights: Tensor) -> None:
        """Put down what one operation's backward needs; it takes the weights from the end, one by one."""
        if self.training:
            self._kept.append(kept)
            for weight in weights:
                self.weights.append(weight.detach())  # autograd would look for a leaf among its inputs

    def take(self) -> tuple[Any, ...]:
        """Return what the last operation that is not through yet has put down."""
        return self._kept.pop()


class ReturnedGradient:
    """The slot of a parameter without an engine: its gradient goes back to autograd."""

    def __init__(self, parameter: nn.Parameter):
        self._shape = parameter.shape
        self.gradient: Tensor | None = None

    def expect(self) -> None:
        """Announce a use, which is not counted here."""

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def add_sum(self, rows: Tensor) -> None:
        """Add the sum of rows."""
        self.add(rows.sum(0))

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


def apply(operation: Operation, *inputs: Any) -> Any:
    """Return what an operation computes; where gradients are wanted, its backward runs in autograd's.

    Args:
        inputs: the first is a tensor.
    """
    tape = Tape(operation, torch.is_grad_enabled())
    if not tape.training:
        return operation.run(tape, *inputs)
    # Where the graph begins elsewhere and gradients go into slots, autograd need not know parameters.
    if not (inputs[0].requires_grad and hasattr(operation.owners[0]["weight"], "gradient_slot")):
        every = (parameter for owner in operation.owners for parameter in owner.values())
        tape.parameters = tuple(parameter for parameter in every if parameter is not None)
    return _Function.apply(tape, *inputs, *tape.parameters)
