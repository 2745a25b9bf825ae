"""LayerNorm and RMSNorm, of one tensor or of a sum; whole on every rank of the tensor axis; no parameter decays.

The norm of a sum makes the sum on its way: its backward adds what reaches the sum by the residual stream, so neither
direction has a pass for the addition alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.kernels.operations import Operations
from megazero.model.contract import GradientSlot
from megazero.model.parameter import declare, deliver, use


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        ops: Operations,
        weight_slot: GradientSlot | None,
        bias_slot: GradientSlot | None,
    ) -> Tensor:
        y, mean, rstd = ops.layer_norm(x, weight_D, bias_D, eps)
        ctx.save_for_backward(x, mean, rstd, weight_D)
        ctx.ops, ctx.slots = ops, (weight_slot, bias_slot)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.ops.layer_norm_backward(grads[0].contiguous(), *ctx.saved_tensors)
        weight_slot, bias_slot = ctx.slots
        return grad_x, deliver(weight_slot, grad_weight), deliver(bias_slot, grad_bias), None, None, None, None


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        ops: Operations,
        weight_slot: GradientSlot | None,
        bias_slot: GradientSlot | None,
    ) -> tuple[Tensor, Tensor]:
        total, y, mean, rstd = ops.add_layer_norm(x, residual, weight_D, bias_D, eps)
        ctx.save_for_backward(total, mean, rstd, weight_D)
        ctx.ops, ctx.slots = ops, (weight_slot, bias_slot)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_total, grad = (each.contiguous() for each in grads)
        grad_x, grad_weight, grad_bias = ctx.ops.add_layer_norm_backward(grad, grad_total, *ctx.saved_tensors)
        weight_slot, bias_slot = ctx.slots
        return grad_x, grad_x, deliver(weight_slot, grad_weight), deliver(bias_slot, grad_bias), None, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_D: Tensor, eps: float, ops: Operations, weight_slot: GradientSlot | None
    ) -> Tensor:
        y, rrms = ops.rms_norm(x, weight_D, eps)
        ctx.save_for_backward(x, rrms, weight_D)
        ctx.ops, ctx.slot = ops, weight_slot
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.ops.rms_norm_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return grad_x, deliver(ctx.slot, grad_weight), None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight_D: Tensor,
        eps: float,
        ops: Operations,
        weight_slot: GradientSlot | None,
    ) -> tuple[Tensor, Tensor]:
        total, y, rrms = ops.add_rms_norm(x, residual, weight_D, eps)
        ctx.save_for_backward(total, rrms, weight_D)
        ctx.ops, ctx.slot = ops, weight_slot
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_total, grad = (each.contiguous() for each in grads)
        grad_x, grad_weight = ctx.ops.add_rms_norm_backward(grad, grad_total, *ctx.saved_tensors)
        return grad_x, grad_x, deliver(ctx.slot, grad_weight), None, None, None


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias (Ba et al. 2016)."""

    def __init__(self, hidden: int, eps: float, ops: Operations):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.bias = declare((hidden,))
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        slots = use(self.weight), use(self.bias)
        return _LayerNorm.apply(x.contiguous(), self.weight, self.bias, self.eps, self.ops, *slots)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its norm."""
        both, slots = (x.contiguous(), residual.contiguous()), (use(self.weight), use(self.bias))
        return _AddLayerNorm.apply(*both, self.weight, self.bias, self.eps, self.ops, *slots)


class RMSNorm(nn.Module):
    """RMSNorm with a weight and no bias (Zhang and Sennrich 2019)."""

    def __init__(self, hidden: int, eps: float, ops: Operations):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x.contiguous(), self.weight, self.eps, self.ops, use(self.weight))

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its norm."""
        both = x.contiguous(), residual.contiguous()
        return _AddRMSNorm.apply(*both, self.weight, self.eps, self.ops, use(self.weight))


def make_norm(kind: str, hidden: int, eps: float, ops: Operations) -> LayerNorm | RMSNorm:
    """Return the norm of a kind, "layernorm" or "rmsnorm"."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](hidden, eps, ops)
