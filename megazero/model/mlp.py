"""The feed-forward part of a block: GELU (GPT) or SwiGLU (Llama).

Gate and up are two parameters, so that each is split over the tensor axis by whole rows. The last product is a block's
last, so where nobody looks at the block's output it is left out.

Shapes: n rows of this rank's part of the residual stream, N of the whole sequence, D hidden, F feed-forward.
"""

from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.model.embedding import INITIAL_STD
from megazero.model.linear import ColumnLinear, ColumnProducts, RowLinear
from megazero.model.parameter import declare
from megazero.model.tape import Tape


class GeluMlp(nn.Module):
    """The MLP down(gelu(up(x))), with the first bias added inside the activation, which saves a pass over its input."""

    def __init__(self, hidden: int, ffn: int, *, bias: bool, out_std: float, region: Region, ops: Operations):
        super().__init__()
        self.up = ColumnLinear(hidden, ffn, bias=False, std=INITIAL_STD, region=region)
        self.up_bias = declare((ffn,), axis=region.axis) if bias else None
        self.down = RowLinear(ffn, hidden, bias=bias, std=out_std, region=region)
        self._inward, self._outward, self._ops = self.up.product, self.down.product, ops
        self.owners = (*self._inward.owners, self._parameters, *self._outward.owners)

    def run(self, tape: Tape, x_nD: Tensor, *, skip_output: bool = False) -> Tensor:
        """Return the result, [n, D]; `skip_output` as of `RowProduct`."""
        (x_NF,) = self._inward.run(tape, x_nD)
        bias_F = self._parameters.get("up_bias")
        tape.keep((x_NF, tape.use(bias_F)), *(() if bias_F is None else (bias_F,)))
        return self._outward.run(tape, self._ops.bias_gelu(x_NF, bias_F), skip_output=skip_output)

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x, for a contiguous one of the result."""
        grad = self._outward.back(tape, grad)
        grad = self._through_gelu(tape, grad)
        return self._inward.back(tape, grad)

    def _through_gelu(self, tape: Tape, grad_NF: Tensor) -> Tensor:
        x_NF, slot = tape.take()
        grad_x = self._ops.bias_gelu_backward(grad_NF, x_NF, None if slot is None else tape.weights.pop())
        if slot is not None:
            slot.add_sum(grad_x)
        return grad_x


class SwigluMlp(nn.Module):
    """The MLP down(silu(gate(x)) * up(x)) (Shazeer 2020); gate and up share one gather of their input.

    It keeps gate and up for its backward, which computes silu(gate) again.
    """

    def __init__(self, hidden: int, ffn: int, *, bias: bool, out_std: float, region: Region, ops: Operations):
        super().__init__()
        self.gate = ColumnLinear(hidden, ffn, bias=bias, std=INITIAL_STD, region=region)
        self.up = ColumnLinear(hidden, ffn, bias=bias, std=INITIAL_STD, region=region)
        self.down = RowLinear(ffn, hidden, bias=bias, std=out_std, region=region)
        self._inward = ColumnProducts(region, self.gate._parameters, self.up._parameters)
        self._outward, self._ops = self.down.product, ops
        self.owners = (*self._inward.owners, *self._outward.owners)

    def run(self, tape: Tape, x_nD: Tensor, *, skip_output: bool = False) -> Tensor:
        """Return the result, [n, D]; `skip_output` as of `RowProduct`."""
        gate_and_up = self._inward.run(tape, x_nD)
        tape.keep(gate_and_up)
        return self._outward.run(tape, self._ops.swiglu(*gate_and_up), skip_output=skip_output)

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x, for a contiguous one of the result."""
        grad = self._outward.back(tape, grad)
        grads = self._ops.swiglu_backward(grad, *tape.take())
        del grad  # as large as each of these
        return self._inward.back(tape, *grads)


def make_mlp(
    kind: str, hidden: int, ffn: int, *, bias: bool, out_std: float, region: Region, ops: Operations
) -> GeluMlp | SwigluMlp:
    """Return the MLP of a kind, "gelu" or "swiglu"."""
    made = {"gelu": GeluMlp, "swiglu": SwigluMlp}[kind]
    return made(hidden, ffn, bias=bias, out_std=out_std, region=region, ops=ops)
