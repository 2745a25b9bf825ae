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

Pair = tuple[Callable[..., Any], Callable[..., Any]]  # of operations: the forward and its backward


class Norm(nn.Module):
    """LayerNorm with weight and bias (Ba et al. 2016), or RMSNorm with a weight alone (Zhang and Sennrich 2019).

    Args:
        bias: as the operations want it.
        plain, of_sum: the operations of the norm, and of the norm of a sum.
    """

    def __init__(self, hidden: int, eps: float, *, bias: bool, plain: Pair, of_sum: Pair):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        if bias:
            self.bias = declare((hidden,))
        self.owners: tuple[Owner, ...] = (self._parameters,)
        self._eps, self._plain, self._of_sum = eps, plain, of_sum

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


def make_norm(kind: str, hidden: int, eps: float, ops: Operations) -> Norm:
    """Return the norm of a kind, "layernorm" or "rmsnorm"."""
    if kind == "layernorm":
        plain, of_sum = "layer_norm", "add_layer_norm"
    else:
        plain, of_sum = "rms_norm", "add_rms_norm"
    pairs = [(getattr(ops, name), getattr(ops, f"{name}_backward")) for name in (plain, of_sum)]
    return Norm(hidden, eps, bias=kind == "layernorm", plain=pairs[0], of_sum=pairs[1])
