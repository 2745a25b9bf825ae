"""Let all ranks agree on a reason to end a run before its last step.

A single rank may receive a signal or find its disk full, and if it ended alone, the others would wait for it. So once
per step, before the update, every rank votes for the reasons that it knows, and the votes are summed together with the
loss (`zero/engine.py`). They are read with the step's other numbers during the next step: a run ends at most two steps
after the step in which a rank got the reason.
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
    """A reason to end a run.

    Attributes:
        text: for display, such as "stopped by SIGTERM".
        exit_code: of the run.
    """

    text: str
    exit_code: int = REQUEUE


FAILED = Reason("a checkpoint could not be written", 1)
FILE = Reason("stopped by the file STOP", 0)
TIME = Reason("stopped by run.time_limit")
BY_SIGNAL = {number: Reason(stopped_by(number)) for number in NOTED}
REASONS = (FAILED, *BY_SIGNAL.values(), TIME, FILE)  # by priority: the first one with a vote applies to all ranks


class Stopping:
    """The agreement of all ranks on when a run ends.

    Args:
        world: all ranks.
        signals: the signals received by this rank.
        file: the run ends when this file exists; only rank 0 looks for it.
        time_limit: seconds from now, on rank 0's clock; None: no limit.
        clock: returns monotonic seconds.
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
        """Return this rank's votes in a step: indices into `REASONS`.

        Args:
            failed: a write in the background has failed.
            saving: seconds that a checkpoint takes.
        """
        now, is_first, told = self._clock(), self._world.rank == 0, self._signals.first
        self._longest = max(self._longest, now - (now if self._last is None else self._last))
        self._last = now
        # The next vote is one step away, and its result takes effect after that step's update and one more step.
        late = self._end is not None and now + 3 * self._longest + 1.5 * saving >= self._end
        known = {FAILED: failed, TIME: is_first and late}
        known[FILE] = is_first and os.path.lexists(self._file)  # also False on an I/O error
        reasons = [reason for reason, holds in known.items() if holds] + ([] if told is None else [BY_SIGNAL[told]])
        return [REASONS.index(reason) for reason in reasons]

    def counted(self, votes: Sequence[float]) -> Reason | None:
        """Return the reason to end the run by all ranks' votes in a step; None: continue.

        Args:
            votes: the number of votes for each of `REASONS`.
        """
        if not self._began and self._world.rank == 0:
            self._first_step()
        self._began = True
        return _first(votes)

    def check(self, saving: float = 0.0) -> Reason | None:
        """Vote and count at once, outside a step. Collective; returns as `counted`.

        Args:
            saving: seconds that a checkpoint takes.
        """
        cast, self._last = torch.zeros(len(REASONS), dtype=torch.int64), None  # only steps are timed
        for vote in self.votes(failed=False, saving=saving):
            cast[vote] = 1
        self._last = None
        return _first(all_reduce(cast.to(self._device), self._world, "agree").tolist())


def _first(votes: Sequence[float]) -> Reason | None:
    return next((reason for reason, count in zip(REASONS, votes, strict=True) if count), None)
