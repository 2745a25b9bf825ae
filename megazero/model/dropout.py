"""Dropout whose mask is a function of (seed, step, layer, site, sample, position, channel).

It acts only on the embedding and on the two residual additions of a block, not on attention probabilities. Every
layout, every recomputation and the backward compute equal masks (`kernels/counter.py`), so masks are never stored.
"""

from typing import Any

import torch
from torch import Tensor

from megazero.kernels import counter
from megazero.kernels.operations import Operations
from megazero.model.batch_context import BatchContext


class _Dropout(torch.autograd.Function):
    """Multiplication by the mask; the backward multiplies the gradient by the same mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: "Dropout", step: BatchContext) -> Tensor:
        ctx.dropout, ctx.step = dropout, step
        return dropout.masked(x, step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.dropout.masked(grads[0], ctx.step), None, None


class Dropout:
    """Dropout of one site of one layer.

    Args:
        drop: the probability to drop an element; 0 is the identity.
        seed: of the run.
        layer: the block's index; the number of layers for the embedding.
        site: 0 or 1, for the first or second residual addition of the block.
        ops: the kernels to use.
    """

    def __init__(self, drop: float, *, seed: int, layer: int, site: int, ops: Operations):
        self.drop, self.ops = drop, ops
        self._name = seed, layer, site

    def acts(self, step: BatchContext) -> bool:
        """Return True if elements are dropped; otherwise this is the identity."""
        return bool(self.drop and step.training)

    def __call__(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return dropout(x)."""
        if not self.acts(step):
            return x_SBD
        return _Dropout.apply(x_SBD, self, step)

    def added(self, x_SBD: Tensor, residual_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return residual + dropout(x), without a graph; the backward of dropout is `masked`."""
        x, residual = x_SBD.contiguous(), residual_SBD.contiguous()
        return self.ops.dropout_add(x, residual, *self.site(x, step), self.drop)

    def masked(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return the product of x with the mask, without a graph."""
        return self.ops.dropout_backward(x_SBD.contiguous(), *self.site(x_SBD, step), self.drop)

    def site(self, x_SBD: Tensor, step: BatchContext) -> tuple[Tensor, Tensor, int]:
        """Return the inputs of the mask other than channels: sample ids, positions, and a key of all others."""
        seed, layer, site = self._name
        return step.sample_ids_B, step.positions_S(x_SBD.shape[0]), counter.derive_key(seed, step.step, layer, site)
