"""Describe one micro-batch to the layers: a frozen value, captured in forward and used again in recomputation.

Global state instead would give wrong gradients as soon as two micro-batches are in flight: after F0 F1, backward B0
would recompute micro-batch 0 with the dropout masks and positions of micro-batch 1.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megazero.model.cache import Cache
from megazero.model.documents import Documents


@dataclass(frozen=True)
class BatchContext:
    """The properties of one micro-batch: S positions of the sequence, B samples.

    Attributes:
        step: the training step, counted from 0 (dropout masks depend on it).
        sample_ids_B: int64 global ids of the samples (dropout masks depend on them, not on ranks or rows).
        sequence_offset: the first position of this rank's part of the residual stream (sequence parallelism).
        positions_SB: int64 position of each token in its document; None: 0..S-1 in every sample.
        documents: attention stays inside each of them; None: each sample is one document.
        training: dropout acts only when True.
        recomputing: this is a layer's second run, for its backward only: its output is not read, and a layer may omit
            work that only the output needs.
        cache: keys and values of earlier tokens, to which this pass adds its own; None: the texts begin here.
        targets_SB, valid_SB: int64 next tokens, and which of them count; with these the head returns losses.
        greedy: with the losses the head returns whether each target is the most probable token.
    """

    step: int
    sample_ids_B: Tensor
    sequence_offset: int = 0
    positions_SB: Tensor | None = None
    documents: Documents | None = None
    training: bool = True
    recomputing: bool = False
    cache: Cache | None = None
    targets_SB: Tensor | None = None
    valid_SB: Tensor | None = None
    greedy: bool = False

    def within_documents(self, positions_SB: Tensor, lengths: tuple[tuple[int, ...], ...]) -> Self:
        """Return this context with attention and positions limited to documents (`data.mask_eod`).

        Args:
            positions_SB: int64, restarting at 0 in each document.
            lengths: for each sample, the lengths of its documents in order.
        """
        return replace(self, positions_SB=positions_SB, documents=Documents(lengths, positions_SB.device))

    def scored(self, targets_SB: Tensor | None, valid_SB: Tensor | None) -> Self:
        """Return this context for a pass that ends with the loss of each token; without targets, with logits."""
        return replace(self, targets_SB=targets_SB, valid_SB=valid_SB)

    def recomputed(self) -> Self:
        """Return this context for a layer whose output is not used."""
        return replace(self, recomputing=True)

    def positions_S(self, length: int) -> Tensor:
        """Return the sequence positions of the `length` tokens in this rank's residual stream: int64 [length]."""
        start = self.sequence_offset
        return torch.arange(start, start + length, device=self.sample_ids_B.device)

    def document_positions(self, length: int) -> Tensor:
        """Return the positions in their documents of the `length` tokens in this rank's residual stream, int64.

        [length, B]; [length] without documents.
        """
        if self.positions_SB is None:
            return self.positions_S(length)
        return self.positions_SB[self.sequence_offset : self.sequence_offset + length]
