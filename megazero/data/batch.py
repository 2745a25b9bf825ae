"""The input of a step: the micro-batches of one data rank, and the interface of their source.

Shapes: S sequence, B rows of a micro-batch; sequence first, as everywhere in the model.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass.

    Attributes:
        tokens_SB, targets_SB: int64; the target is the next token.
        valid_SB: bool, which targets count in the loss.
        positions_SB: int64, counted from the start of the token's document, or of the window if that is later; None:
            0 ... S - 1 in each row.
        documents: the lengths of the documents of each row, in order; None: each row is one document.
        sample_ids_B: int64, numbers of the samples over the whole run (validation: of the windows).
    """

    tokens_SB: torch.Tensor
    targets_SB: torch.Tensor
    valid_SB: torch.Tensor
    positions_SB: torch.Tensor | None
    documents: tuple[tuple[int, ...], ...] | None
    sample_ids_B: torch.Tensor


class BatchSource(ABC):
    """The micro-batches of one data rank; every result is a function of the step alone."""

    @abstractmethod
    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, in order."""

    @abstractmethod
    def samples(self, steps: int) -> int:
        """Return how many samples the first `steps` steps consume, which is the id of the next sample."""

    @abstractmethod
    def epoch(self, steps: int) -> float:
        """Return the number of passes over the data set in the first `steps` steps."""

    @abstractmethod
    def epochs(self, steps: int) -> dict[str, float] | None:
        """Return the passes over each source in the first `steps` steps, by name; None if sources have no names."""

    @abstractmethod
    def close(self) -> None:
        """End background work."""
