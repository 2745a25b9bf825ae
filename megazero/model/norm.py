"""LayerNorm and RMSNorm, of one tensor or of a sum; whole on every rank of the tensor axis; no parameter decays.

The norm of a sum makes the sum on its way: its backward adds what reaches the sum by the residual stream, so neither
direction has a pass for the addition alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megazero.kernels.operations import Operations
from megazero.model.contract import GradientSlot
from megazero.model.parameter import declare, deliver, use

Pair = tuple[Callable[..., Any], Callable[..., Any]]  # of operations: the forward and its backward
Slots = tuple[GradientSlot | None, ...]  # of the weight, and of the bias where there is one; parameters_D likewise


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, pair: Pair, slots: Slots, *parameters_D: Tensor) -> Tensor:
        y, *statistics = pair[0](x, *parameters_D, eps)
        ctx.save_for_backward(x, *statistics, parameters_D[0])
        ctx.operation, ctx.slots = pair[1], slots
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, *gradients_D = ctx.operation(grads[0].contiguous(), *ctx.saved_tensors)
        return grad_x, None, None, None, *map(deliver, ctx.slots, gradients_D)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, eps: float, pair: Pair, slots: Slots, *parameters_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, y, *statistics = pair[0](x, residual, *parameters_D, eps)
        ctx.save_for_backward(total, *statistics, parameters_D[0])
        ctx.operation, ctx.slots = pair[1], slots
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_total, grad = (each.contiguous() for each in grads)
        grad_x, *gradients_D = ctx.operation(grad, grad_total, *ctx.saved_tensors)
        return grad_x, grad_x, None, None, None, *map(deliver, ctx.slots, gradients_D)


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias (Ba et al. 2016)."""

    def __init__(self, hidden: int, eps: float, ops: Operations):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.bias = declare((hidden,))
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        pair, slots = (self.ops.layer_norm, self.ops.layer_norm_backward), (use(self.weight), use(self.bias))
        return _Norm.apply(x.contiguous(), self.eps, pair, slots, self.weight, self.bias)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its norm."""
        both, slots = (x.contiguous(), residual.contiguous()), (use(self.weight), use(self.bias))
        pair = self.ops.add_layer_norm, self.ops.add_layer_norm_backward
        return _AddNorm.apply(*both, self.eps, pair, slots, self.weight, self.bias)


class RMSNorm(nn.Module):
    """RMSNorm with a weight and no bias (Zhang and Sennrich 2019)."""

    def __init__(self, hidden: int, eps: float, ops: Operations):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        pair = self.ops.rms_norm, self.ops.rms_norm_backward
        return _Norm.apply(x.contiguous(), self.eps, pair, (use(self.weight),), self.weight)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its norm."""
        both, pair = (x.contiguous(), residual.contiguous()), (self.ops.add_rms_norm, self.ops.add_rms_norm_backward)
        return _AddNorm.apply(*both, self.eps, pair, (use(self.weight),), self.weight)


def make_norm(kind: str, hidden: int, eps: float, ops: Operations) -> LayerNorm | RMSNorm:
    """Return the norm of a kind, "layernorm" or "rmsnorm"."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](hidden, eps, ops)
