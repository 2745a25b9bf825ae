"""LayerNorm and RMSNorm, whole on every rank of the tensor axis; their parameters never decay."""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.kernels import reference as ops
from megazero.model.parameter import GradientSlot, declare, deliver, use


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        weight_slot: GradientSlot | None,
        bias_slot: GradientSlot | None,
    ) -> Tensor:
        y, mean, rstd = ops.layer_norm(x, weight_D, bias_D, eps)
        ctx.save_for_backward(x, mean, rstd, weight_D)
        ctx.slots = weight_slot, bias_slot
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight_D = ctx.saved_tensors
        weight_slot, bias_slot = ctx.slots
        grad_x, grad_weight, grad_bias = ops.layer_norm_backward(grads[0], x, mean, rstd, weight_D)
        return grad_x, deliver(weight_slot, grad_weight), deliver(bias_slot, grad_bias), None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, weight_slot: GradientSlot | None) -> Tensor:
        y, rrms = ops.rms_norm(x, weight_D, eps)
        ctx.save_for_backward(x, rrms, weight_D)
        ctx.slot = weight_slot
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rrms, weight_D = ctx.saved_tensors
        grad_x, grad_weight = ops.rms_norm_backward(grads[0], x, rrms, weight_D)
        return grad_x, deliver(ctx.slot, grad_weight), None, None


class LayerNorm(nn.Module):
    """Ba et al. 2016, with weight and bias."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.bias = declare((hidden,))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, use(self.weight), use(self.bias))


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019, with a weight and no bias."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight = declare((hidden,), mean=1.0)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, use(self.weight))


def make_norm(kind: str, hidden: int, eps: float) -> LayerNorm | RMSNorm:
    """`kind` is "layernorm" or "rmsnorm"."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](hidden, eps)
