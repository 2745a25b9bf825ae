"""Validate: compute the mean loss over held-out sequences, also in bits per byte of text.

Nats per token depend on the tokenizer, because a larger vocabulary has longer tokens. Bits per byte do not:
total nats / (ln 2 x bytes of the scored tokens' text).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.data.batch import MicroBatch
from megazero.observe.metrics import VALID_BITS, VALID_LOSS

_AT_ONCE = 8  # batches at once for each stage of a pipeline: enough to fill it, few enough for memory


class Evaluation(ABC):
    """An evaluation of the model during training, on all ranks.

    Attributes:
        every: steps between evaluations; None: only after the last step.
    """

    every: int | None

    def due(self, done: int, steps: int) -> bool:
        """Return whether it follows step `done`, counted from 1, of a run of `steps` steps."""
        return done == steps or (self.every is not None and done % self.every == 0)

    @abstractmethod
    def score(self, done: int, stop: Callable[[], bool]) -> Mapping[str, float] | None:
        """Return values for the row of step `done`.

        Args:
            stop: called at times, equally often on all ranks; if True (on all): return None.
        """


class Validation(Evaluation):
    """Scores a model on a fixed set of batches: mean loss in nats per valid token, and bits per byte.

    Args:
        name: of the set; "": it has none.
        every: see `Evaluation`.
        batches: returns this rank's batches, from the first; equally many on every rank.
        losses: returns the token losses [S, B] of given batches, without gradients or dropout; [] on ranks without the
            last stage.
        token_bytes: int64 or float64 [vocab], the bytes of text of each id; None: there is no tokenizer.
        axes: the axes over which the sums are reduced.
        stages: number of pipeline ranks.
        device: of this rank.
    """

    def __init__(
        self,
        name: str,
        every: int | None,
        batches: Callable[[], Iterable[MicroBatch]],
        losses: Callable[[list[MicroBatch]], list[Tensor]],
        token_bytes: np.ndarray | None,
        axes: Sequence[Axis],
        stages: int,
        device: torch.device,
    ):
        self.every, self._end = every, f".{name}" if name else ""
        self._batches, self._losses, self._axes, self._device = batches, losses, axes, device
        self._at_once = _AT_ONCE * stages if stages > 1 else 1
        self._count = 0  # number of batches, known after `check`
        self._token_bytes = None if token_bytes is None else torch.from_numpy(token_bytes)

    def check(self, where: str) -> None:
        """Read every batch once, to find faults in the data before training; errors name `where`, the data file.

        Raises:
            UserError: 205, an id is outside the vocabulary; 112, an id is unknown to the tokenizer.
        """
        self._count = 0
        with doing("checking the validation data"):
            for batch in self._batches():
                self._count += 1
                largest = int(batch.targets_SB.max())
                if self._token_bytes is not None and largest >= len(self._token_bytes):
                    what = f"token {largest} is not one of the tokenizer's {len(self._token_bytes)} pieces"
                    raise UserError(112, what, "set data.tokenizer to the one the data was made with", where=where)

    def score(self, done: int, stop: Callable[[], bool]) -> Mapping[str, float] | None:
        """Score the model in one pass over the batches. The loss is NaN if no token is valid."""
        sums = [0.0, 0.0, 0.0]
        batches = iter(self._batches())
        with doing("validating", self._count) as progress:
            while some := list(islice(batches, self._at_once)):
                if stop():
                    return None
                for batch, losses_SB in zip(some, self._losses(some), strict=False):  # no losses, or one per batch
                    sums[0] += losses_SB.sum(dtype=torch.float64).item()
                    sums[1] += int(batch.valid_SB.sum())
                    if self._token_bytes is not None:
                        sums[2] += float(self._token_bytes[batch.targets_SB[batch.valid_SB]].sum())
                progress.advance(len(some))
        everyone = torch.tensor(sums, dtype=torch.float64, device=self._device)
        for axis in self._axes:
            all_reduce(everyone, axis, "validation")
        nats, tokens, size = everyone.tolist()
        found = {f"{VALID_LOSS}{self._end}": nats / tokens if tokens else math.nan}
        return found | ({f"{VALID_BITS}{self._end}": nats / (math.log(2) * size)} if size else {})
