"""Record a torch profiler trace of a few chosen steps.

The trace answers "what ran when, and what waited for what"; the table beside it answers "what took the time" without a
viewer. Both are of this process only. Open the trace in https://ui.perfetto.dev or chrome://tracing.

    profile_step_00000010.json     Chrome trace, one range per step on top
    profile_step_00000010.txt      the most expensive operators, by their own time

The steps themselves run slower while they are recorded, so their `step_time` is not to be quoted. When off (no steps
asked for) nothing is started or written.
"""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megazero.base.held_stderr import stderr_held
from megazero.observe.sinks import warn

TABLE_ROWS = 25
_LOG = logging.getLogger("megazero")
_OF_THE_LIBRARY = re.compile(r"[A-Z]+:\d{4}-\d{2}-\d{2} ")  # how the lines of kineto, torch's recorder, begin


class Profile:
    """A recorder of steps first_step .. first_step + num_steps - 1; as a context it also ends a run cut short.

        with Profile(10, 3, folder) as profile:
            for step in ...:
                with profile.step(step):
                    train(step)

    Args:
        first_step: the first step to record, numbered as in metrics.jsonl (from 1).
        num_steps: how many; 0: none.
        folder: for the two files, made when there are any.
    """

    def __init__(self, first_step: int, num_steps: int, folder: Path):
        self._steps = range(first_step, first_step + num_steps)
        self._folder = folder
        self._profiler: profile | None = None
        self._recorded: list[int] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record one step inside the context, if it is one of the chosen."""
        if step not in self._steps:
            yield
            return
        if self._profiler is None:
            self._start()
        self._recorded.append(step)
        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the recorded trace, if there is one not yet written. A full disk costs the files, not the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with _library_lines_in_log():
            profiler.stop()
        base = self._folder / f"profile_step_{self._recorded[0]:08d}"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(base.with_suffix(".json")))
            base.with_suffix(".txt").write_text(self._table(profiler), encoding="utf-8")
        except (OSError, RuntimeError) as error:
            warn(f"profile: {error}; training goes on without it")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with _library_lines_in_log():
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def _table(self, profiler: profile) -> str:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        events = profiler.key_averages()
        title = f"steps {self._recorded[0]} to {self._recorded[-1]}, operators by their own {device} time\n"
        return title + events.table(sort_by=f"self_{device}_time_total", row_limit=TABLE_ROWS) + "\n"


@contextmanager
def _library_lines_in_log() -> Iterator[None]:
    """Move the lines that torch's recorder writes to standard error into the log; other lines stay there."""
    lines: list[str] = []
    try:
        with stderr_held(lines):
            yield
    finally:
        for line in lines:
            if _OF_THE_LIBRARY.match(line):
                _LOG.info("profiler: %s", line)
            else:
                print(line, file=sys.stderr)
