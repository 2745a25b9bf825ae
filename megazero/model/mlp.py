"""The feed-forward part of a block: GELU (GPT) or SwiGLU (Llama).

Gate and up are two parameters, so that each is split over the tensor axis by whole rows. The last product is a block's
last, so where nobody looks at the block's output it is left out.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.model.batch_context import BatchContext
from megazero.model.contract import GradientSlot
from megazero.model.embedding import INITIAL_STD
from megazero.model.linear import ColumnLinear, RowLinear, column_products
from megazero.model.parameter import declare, deliver, use


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, bias_F: Tensor | None, ops: Operations, slot: GradientSlot | None) -> Tensor:
        ctx.save_for_backward(x_NF, bias_F)
        ctx.ops, ctx.slot = ops, slot
        return ops.bias_gelu(x_NF, bias_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NF, bias_F = ctx.saved_tensors
        grad_x = ctx.ops.bias_gelu_backward(grads[0].contiguous(), x_NF, bias_F)
        grad_bias = None if bias_F is None else deliver(ctx.slot, grad_x.reshape(-1, len(bias_F)).sum(0))
        return grad_x, grad_bias, None, None


class _Swiglu(torch.autograd.Function):
    """SwiGLU that keeps its two inputs and nothing else: backward computes silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, ops: Operations) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.ops = ops
        return ops.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.ops.swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors), None


class GeluMlp(nn.Module):
    """The MLP down(gelu(up(x))), with the first bias added inside the activation, which saves a pass over its input."""

    def __init__(self, hidden: int, ffn: int, *, bias: bool, out_std: float, region: Region, ops: Operations):
        super().__init__()
        self.up = ColumnLinear(hidden, ffn, bias=False, std=INITIAL_STD, region=region)
        self.up_bias = declare((ffn,), axis=region.axis) if bias else None
        self.down = RowLinear(ffn, hidden, bias=bias, std=out_std, region=region)
        self.ops = ops

    def forward(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        slot = None if self.up_bias is None else use(self.up_bias)
        return self.down(_BiasGelu.apply(self.up(x_SBD), self.up_bias, self.ops, slot), skip_output=step.recomputing)


class SwigluMlp(nn.Module):
    """The MLP down(silu(gate(x)) * up(x)) (Shazeer 2020); gate and up share one gather of their input."""

    def __init__(self, hidden: int, ffn: int, *, bias: bool, out_std: float, region: Region, ops: Operations):
        super().__init__()
        self.gate = ColumnLinear(hidden, ffn, bias=bias, std=INITIAL_STD, region=region)
        self.up = ColumnLinear(hidden, ffn, bias=bias, std=INITIAL_STD, region=region)
        self.down = RowLinear(ffn, hidden, bias=bias, std=out_std, region=region)
        self.ops = ops

    def forward(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        gate, up = self.gate, self.up
        gate_SBF, up_SBF = column_products(x_SBD, gate.region, (gate.weight, gate.bias), (up.weight, up.bias))
        return self.down(_Swiglu.apply(gate_SBF, up_SBF, self.ops), skip_output=step.recomputing)


def make_mlp(
    kind: str, hidden: int, ffn: int, *, bias: bool, out_std: float, region: Region, ops: Operations
) -> GeluMlp | SwigluMlp:
    """Return the MLP of a kind, "gelu" or "swiglu"."""
    made = {"gelu": GeluMlp, "swiglu": SwigluMlp}[kind]
    return made(hidden, ffn, bias=bias, out_std=out_std, region=region, ops=ops)
