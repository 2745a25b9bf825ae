"""LayerNorm and RMSNorm, of one tensor or of a sum; whole on every rank of the tensor axis; no parameter decays.

The norm of a sum makes the sum on its way, and the backward adds what reaches the norm's input by the residual stream,
of a norm of a sum or not: neither direction has a pass for the addition alone.
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
        partial: it is of heads that are split over the tensor axis.
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
        """Return x + residual, and its norm; both are contiguous."""
        total, y, *statistics = self._of_sum[0](x, residual, *self._parameters.values(), self._eps)
        self._keep(tape, total, statistics)
        return total, y

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x, for that of the norm."""
        return self._delivered(tape, self._plain[1], grad.contiguous())

    def back_of_sum(self, tape: Tape, grad: Tensor, grad_total: Tensor) -> Tensor:
        """Return the whole gradient of the norm's input, for contiguous ones: of the norm, and by other ways."""
        return self._delivered(tape, self._of_sum[1], grad, grad_total)

    def _keep(self, tape: Tape, x: Tensor, statistics: Sequence[Tensor]) -> None:
        tape.keep((x, statistics, [tape.use(each) for each in self._parameters.values()]), self.owners[0]["weight"])

    def _delivered(self, tape: Tape, operation: Callable[..., Any], *grads: Tensor) -> Tensor:
        x, statistics, slots = tape.take()
        grad_x, *gradients_D = operation(*grads, x, *statistics, tape.weights.pop())
        for slot, gradient_D in zip(slots, gradients_D, strict=True):
            slot.add(gradient_D)
        return grad_x
