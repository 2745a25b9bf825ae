"""Why a run ends before its last step, agreed by all ranks.

One rank may have got a signal, or find its disk full, that others know nothing of; a rank that ended alone would leave
the others waiting. So once a step, before its update, every rank votes for the reasons that it knows, and the votes are
added up together with the loss (`zero/engine.py`). They are read with the step's other numbers, when the next step is
under way: a run ends at most two steps after the one in which it was told to.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.base.stop_signals import NOTED, REQUEUE, stopped_by
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.launcher.signals import Signals


@dataclass(frozen=True)
class Reason:
    """Why a run ends.

    Attributes:
        text: as one says it: "stopped by SIGTERM".
        exit_code: of the run.
    """

    text: str
    exit_code: int = REQUEUE


FAILED = Reason("a checkpoint could not be written", 1)
FILE = Reason("stopped by the file STOP", 0)
TIME = Reason("stopped by run.time_limit")
BY_SIGNAL = {number: Reason(stopped_by(number)) for number in NOTED}
REASONS = (FAILED, *BY_SIGNAL.values(), TIME, FILE)  # the first one that any rank has is everybody's


class Stopping:
    """The agreement of all ranks on when a run ends.

    Args:
        world: all ranks.
        signals: that have come to this one.
        file: that ends the run when it exists; looked for by rank 0.
        time_limit: seconds from now on, for rank 0's clock; None: none.
        clock: seconds that only go forward.
        first_step: called on rank 0 when the first step is complete.
    """

    def __init__(
        self,
        world: Axis,
        device: torch.device,
        signals: Signals,
        file: Path,
        time_limit: float | None,
        clock: Callable[[], float] = time.monotonic,
        first_step: Callable[[], None] = lambda: None,
    ):
        self._world, self._device, self._signals, self._file, self._clock = world, device, signals, file, clock
        self._end = None if time_limit is None else clock() + time_limit
        self._last: float | None = None
        self._longest = 0.0
        self._first_step, self._began = first_step, False

    def votes(self, *, failed: bool, saving: float) -> list[int]:
        """Return what this rank votes for in a step: places in `REASONS`.

        Args:
            failed: something that was written in the background has failed.
            saving: seconds that a checkpoint takes.
        """
        now, is_first, told = self._clock(), self._world.rank == 0, self._signals.first
        self._longest = max(self._longest, now - (now if self._last is None else self._last))
        self._last = now
        # The next vote is a step away, and what it says is acted upon after its update and one more step.
        late = self._end is not None and now + 3 * self._longest + 1.5 * saving >= self._end
        known = {FAILED: failed, TIME: is_first and late}
        known[FILE] = is_first and os.path.lexists(self._file)  # False too where the disk does not answer
        reasons = [reason for reason, holds in known.items() if holds] + ([] if told is None else [BY_SIGNAL[told]])
        return [REASONS.index(reason) for reason in reasons]

    def counted(self, votes: Sequence[float]) -> Reason | None:
        """Return why the run ends by all ranks' votes in a step; None: it goes on.

        Args:
            votes: how many ranks have voted for each of `REASONS`.
        """
        if not self._began and self._world.rank == 0:
            self._first_step()
        self._began = True
        return _first(votes)

    def check(self, saving: float = 0.0) -> Reason | None:
        """Vote and count at once, outside of a step. Every rank calls it, and waits for the others.

        Args:
            saving: seconds that a checkpoint takes.
        """
        cast = torch.zeros(len(REASONS), dtype=torch.int64)
        for vote in self.votes(failed=False, saving=saving):
            cast[vote] = 1
        return _first(all_reduce(cast.to(self._device), self._world, "agree").tolist())


def _first(votes: Sequence[float]) -> Reason | None:
    return next((reason for reason, count in zip(REASONS, votes, strict=True) if count), None)
