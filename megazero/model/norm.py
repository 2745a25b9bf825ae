"""LayerNorm and RMSNorm, of one tensor or of a sum; replicated over the tensor axis, without weight decay.

The norm of a sum computes the sum in the same pass. In backward, `back_of_sum` adds the gradient that reaches the
norm's input through the residual stream, also for a plain norm. So neither direction has a pass only for an addition.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from megazero.kernels.operations import Operations
from megazero.model.parameter import declare
from megazero.model.tape import Owner, Tape


class Norm(nn.Module):
    """LayerNorm with weight and bias (Ba et al. 2016), or RMSNorm with a weight alone (Zhang and Sennrich 2019).

    Args:
        kind: "layernorm" or "rmsnorm".
        ops: the kernels to use.
        partial: the norm acts on heads that are split over the tensor axis.
    """

    def __init__(self, kind: str, hidden: int, eps: float, ops: Operations, *, partial: bool = False):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0, partial=partial)
        if kind == "layernorm":
            self.bias = declare((hidden,), partial=partial)
        self.owners: tuple[Owner, ...] = (self._parameters,)
        name = {"layernorm": "layer_norm", "rmsnorm": "rms_norm"}[kind]
        pairs = [(getattr(ops, each), getattr(ops, f"{each}_backward")) for each in (name, f"add_{name}")]
        self._eps, (self._plain, self._of_sum) = eps, pairs

    def run(self, tape: Tape, x: Tensor) -> Tensor:
        """Return the norm of x."""
        x = x.contiguous()
        y, *statistics = self._plain[0](x, *self._parameters.values(), self._eps)
        self._keep(tape, x, statistics)
        return y

    def run_of_sum(self, tape: Tape, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual and its norm, both contiguous."""
        total, y, *statistics = self._of_sum[0](x, residual, *self._parameters.values(), self._eps)
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

    def _keep(self, tape: Tape, x: Tensor, statistics: Sequence[Tensor]) -> None:
        tape.keep((x, statistics, [tape.use(each) for each in self._parameters.values()]), self.owners[0]["weight"])

    def _delivered(self, tape: Tape, operation: Callable[..., Any], *grads: Tensor) -> Tensor:
        x, statistics, slots = tape.take()
        grad_x, *gradients_D = operation(*grads, x, *statistics, tape.weights.pop())
        for slot, gradient_D in zip(slots, gradients_D, strict=True):
            slot.add(gradient_D)
        return grad_x
