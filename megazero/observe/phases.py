"""Measure a rank's host seconds by phase, from the phases that it reports to its status slot (`StatusSlot.now`).

    data        waiting for the batch
    forward     forward passes, with the sends to and waits for other stages between them
    backward    backward passes, reductions of gradients between them, and the sum of tied weights
    update      norm, clip, update, what ranks agree on after a step, and reading its numbers
    save        the time that a checkpoint blocks training
    validation  validating

A phase lasts until the next one begins, so the phases add up to the wall time. Measuring never waits for the device: on
a GPU the host runs ahead, and the wait for the device counts to the phase in which the host next reads a number
(`train/trainer.py`), mostly backward, or update if a row is made.
"""

import time
from collections.abc import Callable

PHASES: tuple[str, ...] = ("data", "forward", "backward", "update", "save", "validation")
# By the first word of the phase that a rank reports: "backward (weight) of micro-batch 3 in stage 1".
_PHASE_OF = {"reduction": "backward", "tied": "backward"} | {name: name for name in PHASES}


class PhaseSeconds:
    """A sum of seconds by phase.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = PHASES[0], clock()

    def now(self, phase: str) -> None:
        """Begin a phase, as given to the status slot; a name that is no phase counts to the phase before it."""
        self._count()
        self._phase = _PHASE_OF.get(phase.partition(" ")[0], self._phase)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, or since the beginning; the phase under way goes on."""
        self._count()
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._since = now
