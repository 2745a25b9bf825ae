"""Token and position embeddings, and the output projection that may share the token weight.

The vocabulary is split over the tensor axis by rows and padded to a multiple of its size inside the layout only:
padding rows are zero, their logits -inf, and they are never saved, counted or exported.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.model.parameter import GradientSlot, declare, deliver_rows, slot_of
from megazero.parallel.grid import Axis

INITIAL_STD = 0.02  # of every weight matrix and embedding, as in GPT-2


class _Lookup(torch.autograd.Function):
    """rows of a table; the backward adds each row's gradient where it came from."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, indices: Tensor, slot: GradientSlot | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.slot = table.shape, slot
        return table[indices]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        rows = indices.reshape(-1)
        return deliver_rows(ctx.slot, ctx.shape, rows, grads[0].reshape(len(rows), -1)), None, None


def lookup(table: nn.Parameter, indices: Tensor) -> Tensor:
    """table[indices] for a table [rows, D]: [*indices.shape, D]."""
    return _Lookup.apply(table, indices, slot_of(table))


class TokenEmbedding(nn.Module):
    """weight [vocab / tensor, hidden]; it decays, being the output projection's weight too when tied."""

    def __init__(self, vocab: int, hidden: int, *, tensor: Axis):
        super().__init__()
        self.weight = declare((vocab, hidden), std=INITIAL_STD, decay=True, axis=tensor)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        return lookup(self.weight, tokens_SB)


class PositionEmbedding(nn.Module):
    """Learned positions (GPT-2): weight [seq_len, hidden], whole on every rank, never decayed."""

    def __init__(self, seq_len: int, hidden: int):
        super().__init__()
        self.weight = declare((seq_len, hidden), std=INITIAL_STD)

    def forward(self, positions: Tensor) -> Tensor:
        """positions int64 of shape [S] or [S, B]; returns [S, 1, D] or [S, B, D]."""
        embedded = lookup(self.weight, positions)
        return embedded[:, None] if positions.dim() == 1 else embedded
