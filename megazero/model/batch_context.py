"""Describe one micro-batch to the layers: a frozen value, captured in forward and used again in recomputation.

Ambient state in its place gives wrong gradients as soon as two micro-batches are in flight: after F0 F1 the backward
B0 would recompute micro-batch 0 with micro-batch 1's dropout masks and positions.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megazero.model.documents import Documents


@dataclass(frozen=True)
class BatchContext:
    """The properties of one micro-batch: S positions of the sequence, B samples.

    Attributes:
        step: the training step, counted from 0 (dropout masks depend on it).
        sample_ids_B: int64 global ids of the samples (dropout masks depend on them, not on ranks or rows).
        sequence_offset: the first position of the residual stream that this rank holds (sequence parallelism).
        positions_SB: int64 positions of each token in its document, None when they are 0..S-1 for every sample.
        documents: inside which attention stays; None: each sample is one.
        training: dropout acts only when True.
        recomputing: a layer has run before on the same input, and now only its backward is wanted: its output is not
            read, and work that only the output needs may be left out.
    """

    step: int
    sample_ids_B: Tensor
    sequence_offset: int = 0
    positions_SB: Tensor | None = None
    documents: Documents | None = None
    training: bool = True
    recomputing: bool = False

    def within_documents(self, positions_SB: Tensor, lengths: tuple[tuple[int, ...], ...]) -> Self:
        """Return the same step with attention and positions confined to documents (`data.mask_eod`).

        Args:
            positions_SB: int64, restarting at 0 with each document.
            lengths: of the documents of each sample, in order.
        """
        return replace(self, positions_SB=positions_SB, documents=Documents(lengths, positions_SB.device))

    def recomputed(self) -> Self:
        """Return this context for a layer whose output is not used."""
        return replace(self, recomputing=True)

    def positions_S(self, length: int) -> Tensor:
        """Return the positions in the sequence of the `length` tokens of this rank's residual stream: int64."""
        start = self.sequence_offset
        return torch.arange(start, start + length, device=self.sample_ids_B.device)

    def document_positions(self, length: int) -> Tensor:
        """Return the same tokens' positions in their documents: int64 [length, B], or [length] where all start at 0."""
        if self.positions_SB is None:
            return self.positions_S(length)
        return self.positions_SB[self.sequence_offset : self.sequence_offset + length]
