"""Dropout whose mask is a function of (seed, step, layer, site, sample, position, channel).

It acts on the embedding and on the two residual sites of a block, nowhere else; attention probabilities are never
dropped. Every layout and every recomputation draws the same mask (`kernels/counter.py`), and so does the backward:
nobody stores it.
"""

from typing import Any

import torch
from torch import Tensor

from megazero.kernels import counter
from megazero.kernels.operations import Operations
from megazero.model.batch_context import BatchContext


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, dropout: "Dropout", step: BatchContext, skip_output: bool
    ) -> Tensor:
        ctx.dropout, ctx.step = dropout, step
        if skip_output:
            return x.new_zeros(()).expand(x.shape)
        site = dropout.site(x, step)
        return dropout.ops.dropout_add(x.contiguous(), residual.contiguous(), *site, dropout.drop)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(grads[0], ctx.dropout, ctx.step), grads[0], None, None, None


class _Dropout(torch.autograd.Function):
    """The product with the mask; its backward is the same product, of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: "Dropout", step: BatchContext) -> Tensor:
        ctx.dropout, ctx.step = dropout, step
        return _dropped(x, dropout, step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(grads[0], ctx.dropout, ctx.step), None, None


def _dropped(x: Tensor, dropout: "Dropout", step: BatchContext) -> Tensor:
    return dropout.ops.dropout_backward(x.contiguous(), *dropout.site(x, step), dropout.drop)


class Dropout:
    """Dropout of one site of one layer.

    Args:
        drop: the probability to drop an element; 0 is the identity.
        seed: of the run.
        layer: the block's index; the number of layers for the embedding.
        site: 0 or 1, which of the block's two residual additions.
        ops: the kernels to use.
    """

    def __init__(self, drop: float, *, seed: int, layer: int, site: int, ops: Operations):
        self.drop, self.ops = drop, ops
        self._name = seed, layer, site

    def acts(self, step: BatchContext) -> bool:
        """Return True if anything is dropped; otherwise this is the identity."""
        return bool(self.drop and step.training)

    def add(self, x_SBD: Tensor, residual_SBD: Tensor, step: BatchContext, *, skip_output: bool = False) -> Tensor:
        """Return residual + dropout(x).

        Args:
            skip_output: nobody looks at the result, only at its graph: it is not computed.
        """
        if not self.acts(step):
            return residual_SBD + x_SBD
        return _DropoutAdd.apply(x_SBD, residual_SBD, self, step, skip_output)

    def __call__(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return dropout(x)."""
        if not self.acts(step):
            return x_SBD
        return _Dropout.apply(x_SBD, self, step)

    def site(self, x_SBD: Tensor, step: BatchContext) -> tuple[Tensor, Tensor, int]:
        """Return what the mask depends on beside channels: sample ids, positions, and the key of everything else."""
        seed, layer, site = self._name
        key = counter.derive_key(seed, step.step, layer, site)
        return step.sample_ids_B, step.positions_S(x_SBD.shape[0]), key
