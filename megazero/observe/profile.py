"""Record a torch profiler trace of a few chosen steps.

The trace answers "what ran when, and what waited for what"; the table next to it answers "what took the time" without a
viewer. Both are of this process only. Open the trace in https://ui.perfetto.dev or chrome://tracing.

    profile_step_00000010.json     Chrome trace, one range per step on top
    profile_step_00000010.txt      the most expensive operators, by their own time

Steps run slower while they are recorded, so their `step_time` should not be quoted. If no steps are requested, nothing
is started or written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from megazero.base.answers import warn

TABLE_ROWS = 25


class Profile:
    """A recorder of steps first_step .. first_step + num_steps - 1.

        for step in ...:
            with profile.step(step):
                train(step)
        profile.close()    # writes the trace of a run that was cut short

    Args:
        first_step: the first step to record, numbered as in metrics.jsonl (from 1).
        num_steps: the number of steps to record; 0: none.
        folder: the folder of the two files, created when they are written.
    """

    def __init__(self, first_step: int, num_steps: int, folder: Path):
        self._steps = range(first_step, first_step + num_steps)
        self._folder = folder
        self._profiler: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record one step inside the context, if it is one of the chosen."""
        if step not in self._steps:
            yield
            return
        if self._profiler is None:
            self._steps = range(step, self._steps.stop)  # a resumed run may begin in the middle of them
            self._profiler = profile(record_shapes=True)  # on the CPU, and on a GPU if there is one
            self._profiler.start()
        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the recorded trace, if one is not written yet. A full disk loses the files, but not the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        base = self._folder / f"profile_step_{self._steps.start:08d}"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(base.with_suffix(".json")))
            table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=TABLE_ROWS)
            base.with_suffix(".txt").write_text(f"operators by their own {device} time\n{table}\n", encoding="utf-8")
        except (OSError, RuntimeError) as error:
            warn(f"profile: {error}; training goes on without it")
