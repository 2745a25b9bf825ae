"""What a step reads: the micro-batches of one data rank, and who gives them.

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
        positions_SB: int64, from the start of the token's document or of the window; None: 0 ... S - 1.
        documents: the lengths of the documents of each row, in order; None: each row is one.
        sample_ids_B: int64, numbers of the samples over the whole run (validation: of the windows).
    """

    tokens_SB: torch.Tensor
    targets_SB: torch.Tensor
    valid_SB: torch.Tensor
    positions_SB: torch.Tensor | None
    documents: tuple[tuple[int, ...], ...] | None
    sample_ids_B: torch.Tensor


class BatchSource(ABC):
    """The micro-batches of one data rank; all that it returns is a function of the step alone."""

    @abstractmethod
    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, in order."""

    @abstractmethod
    def samples(self, steps: int) -> int:
        """Return how many samples that many steps consume: the id of the next one."""

    @abstractmethod
    def epoch(self, steps: int) -> float:
        """Return how often that many steps go through the data set."""

    @abstractmethod
    def epochs(self, steps: int) -> dict[str, float] | None:
        """Return how often that many steps go through each source, by its name; None where sources have no names."""

    @abstractmethod
    def close(self) -> None:
        """End background work."""
