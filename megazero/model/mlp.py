"""The feed-forward part of a block, such as GELU (GPT) or SwiGLU (Llama).

Gate and up are two parameters, so that each is split over the tensor axis by whole rows. The block runs the last
product, `down`, which may share its sum over the tensor axis with attention's.

Shapes: n rows of this rank's part of the residual stream, N of the whole sequence, D hidden, F feed-forward.
"""

from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.activations import activation
from megazero.kernels.operations import Operations
from megazero.model.linear import ColumnProducts, Linear
from megazero.model.parameter import declare
from megazero.model.tape import Tape
from megazero.plan.matrices import Matrix
from megazero.plan.model import Shape


class Mlp(nn.Module):
    """The MLP down(f(up(x))), or down(f(gate(x)) * up(x)) (Shazeer 2020), with the activation f.

    Without a gate, the first bias is added inside the activation, which saves a pass over its input. With a gate, gate
    and up share one gather of their input, and backward recomputes f(gate).
    """

    def __init__(self, shape: Shape, *, region: Region, ops: Operations):
        super().__init__()
        self._gated, bias = shape.gated, shape.biased("mlp")
        self._activation, self._activation_backward = activation(ops, shape.activation)
        inward, inputs = [], Matrix(shape.ffn, shape.hidden)
        for name in ("gate", "up") if self._gated else ("up",):
            layer = Linear(inputs, bias=bias and self._gated, std=shape.init_std, region=region)
            setattr(self, name, layer)
            inward.append(layer.owner)
        if bias and not self._gated:
            self.up_bias = declare((shape.ffn,), axis=region.axis)
        outputs = Matrix(shape.ffn, shape.hidden, inputs_first=True)
        self.down = Linear(outputs, bias=bias, std=shape.residual_std, region=region)
        self._inward = ColumnProducts(region, *inward)
        self.owners = (*inward, self._parameters)

    def run(self, tape: Tape, x_nD: Tensor) -> Tensor:
        """Return the input of the last product, [N, F]."""
        inner, bias_F = self._inward.run(tape, x_nD), self._parameters.get("up_bias")
        tape.keep((inner, tape.use(bias_F)), *(() if bias_F is None else (bias_F,)))
        return self._activation(*inner) if self._gated else self._activation(*inner, bias_F)

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x, [n, D], from that of the last product's input."""
        inner, slot = tape.take()
        if self._gated:
            grads = self._activation_backward(grad, *inner)
        else:
            bias_F = None if slot is None else tape.weights.pop()
            *grads, grad_bias = self._activation_backward(grad, *inner, bias_F)
            if slot is not None:
                slot.add(grad_bias)
        del grad, inner  # free them: each is as large as one of `grads`
        return self._inward.back(tape, *grads)
