"""LayerNorm and RMSNorm, whole on every rank of the tensor axis; their parameters never decay."""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.kernels.operations import Operations
from megazero.model.parameter import GradientSlot, declare, deliver, use


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
        x, mean, rstd, weight_D = ctx.saved_tensors
        weight_slot, bias_slot = ctx.slots
        grad = grads[0].contiguous()
        grad_x, grad_weight, grad_bias = ctx.ops.layer_norm_backward(grad, x, mean, rstd, weight_D)
        return grad_x, deliver(weight_slot, grad_weight), deliver(bias_slot, grad_bias), None, None, None, None


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
        x, rrms, weight_D = ctx.saved_tensors
        grad_x, grad_weight = ctx.ops.rms_norm_backward(grads[0].contiguous(), x, rrms, weight_D)
        return grad_x, deliver(ctx.slot, grad_weight), None, None, None


class LayerNorm(nn.Module):
    """Ba et al. 2016, with weight and bias."""

    def __init__(self, hidden: int, eps: float, ops: Operations):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.bias = declare((hidden,))
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        slots = use(self.weight), use(self.bias)
        return _LayerNorm.apply(x.contiguous(), self.weight, self.bias, self.eps, self.ops, *slots)


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019, with a weight and no bias."""

    def __init__(self, hidden: int, eps: float, ops: Operations):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x.contiguous(), self.weight, self.eps, self.ops, use(self.weight))


def make_norm(kind: str, hidden: int, eps: float, ops: Operations) -> LayerNorm | RMSNorm:
    """`kind` is "layernorm" or "rmsnorm"."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](hidden, eps, ops)
