"""The feed-forward part of a block: GELU (GPT) or SwiGLU (Llama).

Gate and up are two parameters, so that each is split over the tensor axis by whole rows. The last product is also the
last of the block, so it is omitted if the block's output is not used.

Shapes: n rows of this rank's part of the residual stream, N of the whole sequence, D hidden, F feed-forward.
"""

from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.model.linear import ColumnLinear, ColumnProducts, RowLinear
from megazero.model.parameter import INITIAL_STD, declare, residual_std
from megazero.model.tape import Tape
from megazero.plan.model import Shape


class Mlp(nn.Module):
    """The MLP down(gelu(up(x))), or down(silu(gate(x)) * up(x)) (Shazeer 2020).

    Without a gate, the first bias is added inside the activation, which saves a pass over its input. With a gate, gate
    and up share one gather of their input, and backward recomputes silu(gate).
    """

    def __init__(self, shape: Shape, *, region: Region, ops: Operations):
        super().__init__()
        self._ops, self._gated, bias = ops, shape.activation == "swiglu", shape.layernorm
        inward = []
        for name in ("gate", "up") if self._gated else ("up",):
            layer = ColumnLinear(shape.hidden, shape.ffn, bias=bias and self._gated, std=INITIAL_STD, region=region)
            setattr(self, name, layer)
            inward.append(layer._parameters)
        if bias and not self._gated:
            self.up_bias = declare((shape.ffn,), axis=region.axis)
        self.down = RowLinear(shape.ffn, shape.hidden, bias=bias, std=residual_std(shape.layers), region=region)
        self._inward, self._outward = ColumnProducts(region, *inward), self.down.product
        self.owners = (*inward, self._parameters, *self._outward.owners)

    def run(self, tape: Tape, x_nD: Tensor, *, skip_output: bool = False) -> Tensor:
        """Return the result, [n, D]; for `skip_output` see `RowProduct`."""
        inner, bias_F = self._inward.run(tape, x_nD), self._parameters.get("up_bias")
        tape.keep((inner, tape.use(bias_F)), *(() if bias_F is None else (bias_F,)))
        y_NF = self._ops.swiglu(*inner) if self._gated else self._ops.bias_gelu(*inner, bias_F)
        return self._outward.run(tape, y_NF, skip_output=skip_output)

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x from the contiguous gradient of the result."""
        grad = self._outward.back(tape, grad)
        inner, slot = tape.take()
        if self._gated:
            grads = self._ops.swiglu_backward(grad, *inner)
        else:
            bias_F = None if slot is None else tape.weights.pop()
            *grads, grad_bias = self._ops.bias_gelu_backward(grad, *inner, bias_F)
            if slot is not None:
                slot.add(grad_bias)
        del grad, inner  # free them: each is as large as one of `grads`
        return self._inward.back(tape, *grads)
