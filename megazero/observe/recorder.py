"""Turn the numbers of a step into a row in every sink: rates over the interval, memory, the profile around steps."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from megazero.comm.ledger import Ledger
from megazero.observe.allocations import Allocations
from megazero.observe.metrics import Smoothed, Work, memory_peak_bytes
from megazero.observe.numbers import Value
from megazero.observe.phases import PhaseSeconds
from megazero.observe.profile import Profile
from megazero.observe.sinks import Sinks

_MEASURED_STEP = 2  # all long-lived memory has been allocated


class Recorder:
    """An observer of a run: one `step` context per step, one `row` and `write` per logged step.

    Args:
        sinks: where rows go.
        profile: the profiler, on or off.
        work: the work of a step.
        ledger: counts what this rank sends.
        counted: called once with the peak bytes that a step allocates.
        phases: the phases of this rank; the caller reports each phase to it.
    """

    def __init__(
        self,
        sinks: Sinks,
        profile: Profile,
        work: Work,
        ledger: Ledger,
        counted: Callable[[int], None],
        phases: PhaseSeconds,
    ):
        self._sinks, self._profile, self._work, self._ledger = sinks, profile, work, ledger
        self._counted, self._phases = counted, phases
        self._smoothed, self._sent, self._steps = Smoothed(), 0, 0
        self._restart()

    def start(self) -> None:
        """Start the clock of the first step, because the time before it is not training time."""
        self._sinks.start()
        self._restart()
        self._phases.take()

    @contextmanager
    def step(self, done: int) -> Iterator[None]:
        """Observe step number `done` (from 1) inside the context."""
        before = self._ledger.bytes_sent
        self._steps += 1
        counting = Allocations() if self._steps == _MEASURED_STEP else nullcontext()
        with self._profile.step(done), counting as counted:
            yield
        if counted is not None:
            self._ledger.hold("activations", counted.peak)
            self._ledger.hold("activations", -counted.peak)
            self._counted(counted.peak)
        self._sent = self._ledger.bytes_sent - before
        self._interval += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside from training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began

    def row(self, done: int, numbers: Mapping[str, Value]) -> dict[str, Value]:
        """Return the row of step number `done` (from 1): its numbers, and the rates of the interval that it ends.

        time is in seconds since 1970, tokens are those consumed since the start of the run, comm_bytes those that this
        rank sent in the step, seconds the host's by phase (`phases.py`).
        """
        steps, seconds = self._interval, max(time.perf_counter() - self._began, 1e-9)  # a clock may be too coarse
        tokens = steps * self._work.tokens_per_step
        row: dict[str, Value] = {"step": done, "time": time.time(), "tokens": self._work.tokens(done), **numbers}
        row |= self._work.rates(steps, tokens, seconds, self._smoothed.add(steps, tokens, seconds))
        row |= {"memory_peak_bytes": memory_peak_bytes(self._work.device), "comm_bytes": self._sent}
        return {**row, "seconds": {**self._phases.take()}}

    def write(self, row: Mapping[str, Value], scores: Mapping[str, float]) -> None:
        """Pass a row to the sinks, and begin a new interval.

        The row was made before its step was saved and validated; the seconds of both are added to it here.

        Args:
            scores: results of validations and other evaluations of the step.
        """
        before, seconds = row.get("seconds"), self._phases.take()
        if isinstance(before, dict):
            seconds = {phase: (before.get(phase) or 0.0) + more for phase, more in seconds.items()}
        self._sinks.row({**row, "seconds": {**seconds}, **scores})
        self._restart()

    def close(self) -> None:
        """Close the profile and the sinks; safe to call twice."""
        self._profile.close()
        self._sinks.close()

    def _restart(self) -> None:
        """Begin a new interval now: the steps and training seconds since the last row."""
        self._interval, self._began = 0, time.perf_counter()
