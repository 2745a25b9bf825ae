"""Linear layers that own their weight gradient.

Shapes: N rows (sequence x batch), I inputs, O outputs of this rank.

    column   weight_OI   y_NO = x_NI weight^T + bias    the tensor axis splits O: each rank computes some outputs
    row      weight_IO   y_NO = x_NI weight + bias      the tensor axis splits I: each rank computes a partial sum

Both keep the split dimension first. The backward of each is two products: dx for the layer below, and the weight's
gradient, which goes straight into the parameter's gradient slot.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.model.parameter import GradientSlot, declare, deliver, deliver_product, slot_of
from megazero.parallel.grid import Axis


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        weight_slot: GradientSlot | None,
        bias_slot: GradientSlot | None,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.slots = weight_slot, bias_slot
        ctx.has_bias = bias_O is not None
        return x_NI @ weight_OI.T if bias_O is None else torch.addmm(bias_O, x_NI, weight_OI.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NO,) = grads
        x_NI, weight_OI = ctx.saved_tensors
        weight_slot, bias_slot = ctx.slots
        grad_x = grad_NO @ weight_OI if ctx.needs_input_grad[0] else None
        grad_weight = deliver_product(weight_slot, grad_NO.T, x_NI)
        grad_bias = deliver(bias_slot, grad_NO.sum(0)) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_IO: Tensor,
        bias_O: Tensor | None,
        weight_slot: GradientSlot | None,
        bias_slot: GradientSlot | None,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_IO)
        ctx.slots = weight_slot, bias_slot
        ctx.has_bias = bias_O is not None
        return x_NI @ weight_IO if bias_O is None else torch.addmm(bias_O, x_NI, weight_IO)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NO,) = grads
        x_NI, weight_IO = ctx.saved_tensors
        weight_slot, bias_slot = ctx.slots
        grad_x = grad_NO @ weight_IO.T if ctx.needs_input_grad[0] else None
        grad_weight = deliver_product(weight_slot, x_NI.T, grad_NO)
        grad_bias = deliver(bias_slot, grad_NO.sum(0)) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None


def column_product(x: Tensor, weight_OI: nn.Parameter, bias_O: nn.Parameter | None) -> Tensor:
    """x weight^T + bias for x of shape [..., I]; returns [..., O]."""
    bias_slot = None if bias_O is None else slot_of(bias_O)
    y_NO = _ColumnProduct.apply(x.reshape(-1, x.shape[-1]), weight_OI, bias_O, slot_of(weight_OI), bias_slot)
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


def row_product(x: Tensor, weight_IO: nn.Parameter, bias_O: nn.Parameter | None) -> Tensor:
    """x weight + bias for x of shape [..., I]; returns [..., O]."""
    bias_slot = None if bias_O is None else slot_of(bias_O)
    y_NO = _RowProduct.apply(x.reshape(-1, x.shape[-1]), weight_IO, bias_O, slot_of(weight_IO), bias_slot)
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


class ColumnLinear(nn.Module):
    """Outputs split over the tensor axis: weight [outputs, inputs], bias [outputs]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float, tensor: Axis):
        super().__init__()
        self.weight = declare((outputs, inputs), std=std, decay=True, axis=tensor)
        self.bias = declare((outputs,), axis=tensor) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return column_product(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """Inputs split over the tensor axis: weight [inputs, outputs]; the bias [outputs] is whole on every rank."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float, tensor: Axis):
        super().__init__()
        self.weight = declare((inputs, outputs), std=std, decay=True, axis=tensor)
        self.bias = declare((outputs,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return row_product(x, self.weight, self.bias)
