"""LayerNorm and RMSNorm, of one tensor or of a sum; replicated over the tensor axis, without weight decay.

The norm of a sum computes the sum in the same pass. In backward, `back_of_sum` adds the gradient that reaches the
norm's input through the residual stream, also for a plain norm. So neither direction has a pass only for an addition.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.kernels.operations import Operations
from megazero.model.parameter import declare
from megazero.model.tape import Owner, Tape
from megazero.plan.model import Shape


class Norm(nn.Module):
    """LayerNorm with weight and bias (Ba et al. 2016), or RMSNorm with a weight alone (Zhang and Sennrich 2019).

    Args:
        shape: gives the kind of norm and its options.
        size: number of channels.
        ops: the kernels to use.
        heads: an RMSNorm of queries or keys; of single heads, which the tensor axis splits, or of all.
    """

    def __init__(self, shape: Shape, size: int, ops: Operations, *, heads: bool = False):
        super().__init__()
        partial = heads and shape.qk_norm == "head"
        self.weight = declare((size,), mean=1.0 - shape.norm_offset, partial=partial)
        centred = shape.layernorm and not heads
        if centred and shape.biased("norm"):
            self.bias = declare((size,))
        self.owners: tuple[Owner, ...] = (self._parameters,)
        name = "layer_norm" if centred else "rms_norm"
        pairs = [(getattr(ops, each), getattr(ops, f"{each}_backward")) for each in (name, f"add_{name}")]
        self._plain, self._of_sum = pairs
        lacks_bias = centred and not shape.biased("norm")
        self._vectors: Callable[[], Iterable[Any]] = self._with_zeros if lacks_bias else self._parameters.values
        self._offset = () if shape.norm_offset == 0 else (float(shape.norm_offset),)
        self._numbers: tuple[float, ...] = (shape.norm_eps, *self._offset)
        if not centred and shape.norm_cast == "after":
            self._numbers = (shape.norm_eps, float(shape.norm_offset), False)

    def run(self, tape: Tape, x: Tensor) -> Tensor:
        """Return the norm of x."""
        x = x.contiguous()
        y, *statistics = self._plain[0](x, *self._vectors(), *self._numbers)
        self._keep(tape, x, statistics)
        return y

    def run_of_sum(self, tape: Tape, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual and its norm, both contiguous."""
        total, y, *statistics = self._of_sum[0](x, residual, *self._vectors(), *self._numbers)
        self._keep(tape, total, statistics)
        return total, y

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x from the gradient of the norm."""
        return self._delivered(tape, self._plain[1], grad.contiguous())

    def back_of_sum(self, tape: Tape, grad: Tensor, grad_total: Tensor) -> Tensor:
        """Return the gradient of the norm's input; all tensors are contiguous.

        Args:
            grad: the gradient of the norm's output.
            grad_total: the gradient that reaches the input through the residual stream.
        """
        return self._delivered(tape, self._of_sum[1], grad, grad_total)

    def _with_zeros(self) -> tuple[Tensor, Tensor]:
        """Return the weight, and zeros for the bias that this LayerNorm lacks."""
        return self.weight, torch.zeros_like(self.weight)

    def _keep(self, tape: Tape, x: Tensor, statistics: Sequence[Tensor]) -> None:
        tape.keep((x, statistics, [tape.use(each) for each in self._parameters.values()]), self.owners[0]["weight"])

    def _delivered(self, tape: Tape, operation: Callable[..., Any], *grads: Tensor) -> Tensor:
        x, statistics, slots = tape.take()
        grad_x, *gradients_D = operation(*grads, x, *statistics, tape.weights.pop(), *self._offset)
        for slot, gradient_D in zip(slots, gradients_D[: len(slots)], strict=True):
            slot.add(gradient_D)
        return grad_x
