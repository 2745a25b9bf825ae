"""Dropout whose mask is a function of (seed, step, layer, site, sample, position, channel).

It acts on the embedding and on the two residual sites of a block, nowhere else; attention probabilities are never
dropped. Every layout and every replay draws the same mask (`kernels/counter.py`).
"""

from typing import Any

import torch
from torch import Tensor

from megazero.kernels import counter
from megazero.model.step import Step


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, keep: Tensor, drop: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.drop = drop
        return residual + x * keep * (1.0 / (1.0 - drop))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return grads[0] * keep * (1.0 / (1.0 - ctx.drop)), grads[0], None, None


class Dropout:
    """Dropout of one site of one layer.

    Args:
        drop: the probability to drop an element; 0 is the identity.
        seed: of the run.
        layer: the block's index; the number of layers for the embedding.
        site: 0 or 1, which of the block's two residual additions.
    """

    def __init__(self, drop: float, *, seed: int, layer: int, site: int):
        self.drop, self.seed, self.layer, self.site = drop, seed, layer, site

    def mask(self, x_SBD: Tensor, step: Step) -> Tensor:
        """bool, True where an element of x is kept."""
        key = counter.derive_key(self.seed, step.step, self.layer, self.site)
        channels = torch.arange(x_SBD.shape[-1], device=x_SBD.device)
        return counter.keep_mask(key, step.sample_ids_B, step.positions_S(x_SBD.shape[0]), channels, self.drop)

    def add(self, x_SBD: Tensor, residual_SBD: Tensor, step: Step) -> Tensor:
        """residual + dropout(x)."""
        if not (self.drop and step.training):
            return residual_SBD + x_SBD
        return _DropoutAdd.apply(x_SBD, residual_SBD, self.mask(x_SBD, step), self.drop)

    def __call__(self, x_SBD: Tensor, step: Step) -> Tensor:
        """dropout(x)."""
        if not (self.drop and step.training):
            return x_SBD
        return _DropoutAdd.apply(
            x_SBD, torch.zeros((), dtype=x_SBD.dtype, device=x_SBD.device), self.mask(x_SBD, step), self.drop
        )
