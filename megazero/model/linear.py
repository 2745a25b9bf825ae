"""Linear layers that compute and deliver their weight's gradient themselves.

Shapes: N rows (sequence x batch), n rows of this rank's part of the residual stream (N, or N / t with sequence
parallelism), I inputs, O outputs of this rank.

    column   weight_OI   y_NO = gather(x_nI) weight^T + bias    the tensor axis splits O: a rank computes some outputs
    row      weight_IO   y_nO = sum(x_NI weight) + bias         the tensor axis splits I: a rank computes a partial sum

Both keep the split dimension first. A column product leads into a tensor-parallel region, a row product out of it
(`comm/regions.py` has `gather` and `sum`). The backward of each is two products: dx for the layer below, and the
weight's gradient, which goes straight into the parameter's gradient slot. A column product's dx must be summed over the
tensor axis; the sum is under way while the weight's gradient is computed. With sequence parallelism only a rank's own
part of x is kept for the backward, and gathered again while dx is computed (Korthikanti et al. 2022, section 4.2.2).

Forward has nothing to do beside that but its own products. With several chunks (`Region.chunks`) it cuts the rows n: a
chunk's sum is under way while the next chunk is multiplied; with sequence parallelism a chunk is gathered while the one
before it is multiplied. There chunk i has the i-th rows of every rank's part, so that each rank ends with its own rows
in their order. Two ranks, two chunks:

    rows of rank 0 : rows of rank 1    0 1 2 3 : 4 5 6 7
    the two chunks                     0 1 : 4 5    2 3 : 6 7
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.model.contract import GradientSlot
from megazero.model.parameter import declare, deliver, deliver_product, use

Slots = tuple[tuple[GradientSlot | None, GradientSlot | None], ...]


class _ColumnProducts(torch.autograd.Function):
    """Several products of one input, which is gathered and whose gradient is summed once for all of them."""

    @staticmethod
    def forward(ctx: Any, x_nI: Tensor, region: Region, slots: Slots, *matrices: Any) -> tuple[Tensor, ...]:
        weights, biases = matrices[::2], matrices[1::2]
        ctx.save_for_backward(x_nI, *weights)
        ctx.region, ctx.slots, ctx.has_bias = region, slots, [bias is not None for bias in biases]
        return _gathered_products(x_nI, region, weights, biases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_nI, *weights = ctx.saved_tensors
        gathering = ctx.region.gather(x_nI, "again")
        summing = None
        if ctx.needs_input_grad[0]:
            grad_x = grads[0] @ weights[0]
            for grad_NO, weight_OI in zip(grads[1:], weights[1:], strict=True):
                grad_x.addmm_(grad_NO, weight_OI)
            summing = ctx.region.sum(grad_x, "backward")
        x_NI = gathering.wait()
        delivered: list[Tensor | None] = []
        for grad_NO, (weight_slot, bias_slot), has_bias in zip(grads, ctx.slots, ctx.has_bias, strict=True):
            delivered.append(deliver_product(weight_slot, grad_NO.T, x_NI))
            delivered.append(deliver(bias_slot, grad_NO.sum(0)) if has_bias else None)
        return (None if summing is None else summing.wait(), None, None, *delivered)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        region: Region,
        weight_IO: Tensor,
        bias_O: Tensor | None,
        weight_slot: GradientSlot | None,
        bias_slot: GradientSlot | None,
        skip_output: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_IO)
        ctx.region, ctx.slots, ctx.has_bias = region, (weight_slot, bias_slot), bias_O is not None
        if skip_output:
            rows = len(x_NI) // (region.axis.size if region.sequence else 1)
            return x_NI.new_zeros(()).expand(rows, weight_IO.shape[1])
        # The first rank's partial sum brings the bias along, which costs no pass over the sum.
        return _summed_product(x_NI, region, weight_IO, bias_O if region.axis.rank == 0 else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_nO = grads[0].contiguous()
        x_NI, weight_IO = ctx.saved_tensors
        weight_slot, bias_slot = ctx.slots
        gathering = ctx.region.gather(grad_nO, "backward")
        grad_bias = deliver(bias_slot, grad_nO.sum(0)) if ctx.has_bias else None
        grad_NO = gathering.wait()
        grad_x = grad_NO @ weight_IO.T if ctx.needs_input_grad[0] else None
        grad_weight = deliver_product(weight_slot, x_NI.T, grad_NO)
        return grad_x, None, grad_weight, grad_bias, None, None, None


def _gathered_products(
    x_nI: Tensor, region: Region, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Return gather(x) weight^T + bias of each weight, [N, O]."""
    pairs, cuts = list(zip(weights, biases, strict=True)), region.cut(len(x_nI))
    if not region.sequence or len(cuts) == 1:
        x_NI = region.gather(x_nI, "forward").wait()
        return tuple(_product(x_NI, weight.T, bias) for weight, bias in pairs)
    ranks = region.axis.size
    found = tuple(x_nI.new_empty(ranks * len(x_nI), len(weight)) for weight in weights)
    gathering = [region.gather(x_nI[rows], "forward") for rows in cuts]
    for rows, pending in zip(cuts, gathering, strict=True):
        x_tmI = pending.wait().view(ranks, -1, x_nI.shape[1])
        for y_NO, (weight, bias) in zip(found, pairs, strict=True):
            _product(x_tmI, weight.T, bias, y_NO.view(ranks, len(x_nI), -1)[:, rows])
    return found


def _summed_product(x_NI: Tensor, region: Region, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return sum(x weight + bias), [n, O]."""
    stream = x_NI.view(region.axis.size, -1, x_NI.shape[1]) if region.sequence else x_NI  # [t, n, I] or [n, I]
    cuts = region.cut(stream.shape[-2])
    if len(cuts) == 1:
        return region.sum(_product(x_NI, weight_IO, bias_O), "forward").wait()
    y_nO = x_NI.new_empty(stream.shape[-2], weight_IO.shape[1])
    summing = []
    for rows in cuts:
        y_mO = y_nO[rows]
        partial = _product(stream[..., rows, :], weight_IO, bias_O, None if region.sequence else y_mO)
        summing.append(region.sum(partial.flatten(0, -2), "forward", y_mO))
    for pending in summing:
        pending.wait()
    return y_nO


def _product(x: Tensor, matrix_IO: Tensor, bias_O: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x matrix + bias for x of shape [N, I], or [t, m, I]: the same rows of each of t parts, apart in memory."""
    if x.dim() == 2:
        return torch.mm(x, matrix_IO, out=out) if bias_O is None else torch.addmm(bias_O, x, matrix_IO, out=out)
    matrices = matrix_IO.expand(len(x), -1, -1)  # no copy; the parts are no copy either: both have a stride
    return torch.bmm(x, matrices, out=out) if bias_O is None else torch.baddbmm(bias_O, x, matrices, out=out)


def column_products(
    x: Tensor, region: Region, *matrices: tuple[nn.Parameter, nn.Parameter | None]
) -> tuple[Tensor, ...]:
    """Return gather(x) weight^T + bias, [S, ..., O], for each (weight [O, I], bias [O] or None).

    Args:
        x: [S or S / t, ..., I].
    """
    slots = tuple((use(weight), None if bias is None else use(bias)) for weight, bias in matrices)
    flat = [tensor for pair in matrices for tensor in pair]
    products = _ColumnProducts.apply(x.reshape(-1, x.shape[-1]), region, slots, *flat)
    return tuple(y_NO.view(-1, *x.shape[1:-1], y_NO.shape[-1]) for y_NO in products)


def row_product(
    x: Tensor, region: Region, weight_IO: nn.Parameter, bias_O: nn.Parameter | None, *, skip_output: bool = False
) -> Tensor:
    """Return sum(x weight) + bias, [S or S / t, ..., O], for x of shape [S, ..., I].

    Args:
        skip_output: nobody looks at the result, only at its graph: it is not computed, and nothing is sent.
    """
    bias_slot = None if bias_O is None else use(bias_O)
    flat = x.reshape(-1, x.shape[-1])
    y_nO = _RowProduct.apply(flat, region, weight_IO, bias_O, use(weight_IO), bias_slot, skip_output)
    return y_nO.view(-1, *x.shape[1:-1], y_nO.shape[-1])


class ColumnLinear(nn.Module):
    """A linear layer whose outputs are split over the tensor axis: weight [outputs, inputs], bias [outputs]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float, region: Region):
        super().__init__()
        self.weight = declare((outputs, inputs), std=std, decay=True, axis=region.axis)
        self.bias = declare((outputs,), axis=region.axis) if bias else None
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        return column_products(x, self.region, (self.weight, self.bias))[0]


class RowLinear(nn.Module):
    """A linear layer whose inputs are split over the tensor axis: weight [inputs, outputs].

    The bias [outputs] is whole on every rank.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float, region: Region):
        super().__init__()
        self.weight = declare((inputs, outputs), std=std, decay=True, axis=region.axis)
        self.bias = declare((outputs,)) if bias else None
        self.region = region

    def forward(self, x: Tensor, *, skip_output: bool = False) -> Tensor:
        return row_product(x, self.region, self.weight, self.bias, skip_output=skip_output)
