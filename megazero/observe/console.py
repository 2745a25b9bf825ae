"""Show progress to the user: a line per row.

    step 120/1000  loss 4.3127  norm 1.31  lr 3.000e-04  18,204 tok/s  1.21 TFLOP/s  0.112 s/step  12:31 left

On a terminal the heartbeat's live line stays below these lines (`base/heartbeat.py`). Time left is (steps to go) x
(mean seconds of a step in this invocation, so far). Rows are ASCII, for logs in any locale. When the reader is gone
(`| head`, a dropped terminal), the console prints nothing more and training goes on.
"""

import math
from collections.abc import Mapping
from typing import TextIO

from megazero.base.heartbeat import HEART
from megazero.observe.metrics import EVAL, VALID_LOSS, Value, results, valid_losses
from megazero.observe.sinks import Sink


def clock_text(seconds: float) -> str:
    """Return seconds as m:ss, h:mm:ss or d days h:mm:ss; "?" when not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours == 0:
        return f"{minute}:{second:02d}"
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"


class ConsoleSink(Sink):
    """A sink that writes rows to a stream.

    Args:
        total_steps: the step at which the run ends.
        stream: the output; None (standard output was closed before we started): write nothing.
    """

    def __init__(self, total_steps: int, stream: TextIO | None):
        self._total = total_steps
        self._stream = stream
        self._seconds = 0.0
        self._steps = 0
        self._last_step: int | None = None

    def row(self, row: Mapping[str, Value]) -> None:
        """Write one row, or nothing once the stream is closed.

        Raises:
            OSError: the first time the stream turns out to be closed.
        """
        line = self._text(row, self._time_left(row))
        try:
            if self._stream is not None:
                with HEART.paused():
                    print(line, file=self._stream, flush=True)
        except (OSError, ValueError) as error:  # ValueError: the stream object itself was closed
            self._stream = None
            raise OSError(f"standard output is gone ({error})") from error

    def _time_left(self, row: Mapping[str, Value]) -> float:
        """Return the seconds left, from the mean step time so far; a row counts the steps since the one before."""
        step = int(_number(row, "step"))
        steps = step - self._last_step if self._last_step is not None else 1
        self._last_step = step
        self._steps += steps
        self._seconds += steps * _number(row, "step_time")
        return (self._total - step) * self._seconds / self._steps if self._steps > 0 else math.nan

    def _text(self, row: Mapping[str, Value], left: float) -> str:
        parts = [f"step {row['step']}/{self._total}", f"loss {_number(row, 'loss'):.4f}"]
        parts += [f"valid{key.removeprefix(VALID_LOSS)} {_number(row, key):.4f}" for key in valid_losses(row)]
        parts += [f"{key.removeprefix(EVAL)} {_number(row, key):.4f}" for key in results(row)]
        parts += [f"norm {_number(row, 'grad_norm'):.3g}", f"lr {_number(row, 'lr'):.3e}"]
        if row.get("skipped"):
            parts.append(f"skipped {row['skipped']}")
        parts += [f"{_number(row, 'tokens_per_second'):,.0f} tok/s", f"{_number(row, 'tflops_per_device'):.3g} TFLOP/s"]
        if row.get("mfu") is not None:
            parts.append(f"mfu {100 * _number(row, 'mfu'):.1f}%")
        return "  ".join([*parts, f"{_number(row, 'step_time'):.3g} s/step", f"{clock_text(left)} left"])


def _number(row: Mapping[str, Value], key: str) -> float:
    """Return the value, or nan where the row has none."""
    value = row.get(key)
    return math.nan if value is None or isinstance(value, dict) else float(value)
