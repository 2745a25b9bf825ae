"""Token and position embeddings, and the output projection that may share the token weight.

The vocabulary is split over the tensor axis by rows and padded to a multiple of its size inside the layout only:
padding rows are zero, their logits -inf, and they are never saved, counted or exported.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.regions import Region, leave
from megazero.model.contract import GradientSlot
from megazero.model.parameter import declare, deliver_rows, use

INITIAL_STD = 0.02  # of every weight matrix and embedding, as in GPT-2


class _Lookup(torch.autograd.Function):
    """The lookup of rows in a table; backward adds each row's gradient where it came from, none for absent rows."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, indices: Tensor, absent: Tensor | None, slot: GradientSlot | None) -> Tensor:
        ctx.save_for_backward(indices, absent)
        ctx.shape, ctx.slot = table.shape, slot
        return _without(table[indices], absent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, absent = ctx.saved_tensors
        values = grads[0] if absent is None else _without(grads[0].clone(), absent)
        rows = indices.reshape(-1)
        return deliver_rows(ctx.slot, ctx.shape, rows, values.reshape(len(rows), -1)), None, None, None


def _without(rows: Tensor, absent: Tensor | None) -> Tensor:
    return rows if absent is None else rows.masked_fill_(absent[..., None], 0.0)


def lookup(table: nn.Parameter, indices: Tensor, absent: Tensor | None = None) -> Tensor:
    """Return table[indices] for a table [rows, D]: [*indices.shape, D].

    Args:
        absent: bool like `indices`, True where the row is not in this table: zeros come out, no gradient goes in.
    """
    return _Lookup.apply(table, indices, absent, use(table))


class TokenEmbedding(nn.Module):
    """The token embedding: weight [vocab / tensor, hidden], which decays, being the output projection's too when tied.

    A rank looks up the ids whose rows it holds; the sum over the tensor axis has them all.
    """

    def __init__(self, vocab: int, hidden: int, *, region: Region):
        super().__init__()
        self.weight = declare((vocab, hidden), std=INITIAL_STD, decay=True, axis=region.axis)
        self.region = region

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """Return [S, B, D], with sequence parallelism this rank's part of it."""
        if self.region.axis.size == 1:  # spares two passes over the result
            return lookup(self.weight, tokens_SB)
        indices = tokens_SB - self.region.axis.rank * len(self.weight)
        absent = (indices < 0) | (indices >= len(self.weight))
        return leave(lookup(self.weight, indices.masked_fill(absent, 0), absent), self.region)


class PositionEmbedding(nn.Module):
    """Learned positions (GPT-2): weight [seq_len, hidden], whole on every rank, never decayed."""

    def __init__(self, seq_len: int, hidden: int):
        super().__init__()
        self.weight = declare((seq_len, hidden), std=INITIAL_STD)

    def forward(self, positions: Tensor) -> Tensor:
        """Return [S, 1, D] or [S, B, D] for int64 positions of shape [S] or [S, B]."""
        embedded = lookup(self.weight, positions)
        return embedded[:, None] if positions.dim() == 1 else embedded
