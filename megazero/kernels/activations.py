"""Activations of the MLP that have no kernel of our own, in plain torch: forward and backward, as those in `reference`.

Shapes: N rows, F feed-forward. `bias` may be None; its gradient is then an empty tensor.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.operations import Operations
from megazero.kernels.reference import sum_rows

Pair = tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, ...]]]


def activation(ops: Operations, name: str) -> Pair:
    """Return the forward and the backward of `model.activation`.

    Not gated: x, bias -> y and grad, x, bias -> dx, dbias. Gated: gate, up -> y and grad, gate, up -> dgate, dup.
    """
    own = {"gelu": (ops.bias_gelu, ops.bias_gelu_backward), "swiglu": (ops.swiglu, ops.swiglu_backward)}
    return own.get(name) or _PLAIN[name]


def gelu_erf(x_NF: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return v Phi(v) of v = x + bias, with the normal distribution Phi (Hendrycks and Gimpel 2016)."""
    return F.gelu(_sum(x_NF, bias_F))


def gelu_erf_backward(grad_NF: Tensor, x_NF: Tensor, bias_F: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the bias."""
    return _with_bias(torch.ops.aten.gelu_backward(grad_NF, _sum(x_NF, bias_F)), bias_F)


def relu2(x_NF: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return max(x + bias, 0)^2 (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(_sum(x_NF, bias_F)).square_()


def relu2_backward(grad_NF: Tensor, x_NF: Tensor, bias_F: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the bias."""
    return _with_bias(F.relu(_sum(x_NF, bias_F)).mul_(2).mul_(grad_NF), bias_F)


def geglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """Return gelu(gate) * up with GELU's tanh form (Shazeer 2020)."""
    return F.gelu(gate_NF, approximate="tanh").mul_(up_NF)


def geglu_backward(grad_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    grad_gate = grad_NF * up_NF
    torch.ops.aten.gelu_backward(grad_gate, gate_NF, approximate="tanh", grad_input=grad_gate)
    return grad_gate, F.gelu(gate_NF, approximate="tanh").mul_(grad_NF)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _with_bias(grad_x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return grad_x, sum_rows(grad_x if bias is not None else grad_x[..., :0])


_PLAIN: Mapping[str, Pair] = MappingProxyType(
    {"gelu_erf": (gelu_erf, gelu_erf_backward), "relu2": (relu2, relu2_backward), "geglu": (geglu, geglu_backward)}
)
