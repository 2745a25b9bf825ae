"""Show progress to the user: a line per row, and below them on a terminal one live line.

    step 120/1000  loss 4.3127  norm 1.31  lr 3.000e-04  18,204 tok/s  1.21 TFLOP/s  0.112 s/step  12:31 left
    ---------          120/1000  loss 4.3127  valid 4.2901  18,204 tok/s  12:31 left  step 121/1000 forward  1 s

Time left is (steps to go) x (mean seconds of a step in this invocation, so far). Our text is ASCII, for logs in any
locale. When the reader goes away (`| head`, a dropped terminal) the console falls silent and training goes on.
"""

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from megazero.base.heartbeat import HEART
from megazero.observe.metrics import VALID_LOSS, Value, valid_losses


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


class ConsoleSink:
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
        self._valid: float | None = None
        self._live = _Live(total_steps, stream) if stream is not None and stream.isatty() else None

    def start(self) -> None:
        """Show nothing: the first row is the first output."""

    def row(self, row: Mapping[str, Value]) -> None:
        """Show one row, or nothing once the stream is closed.

        Raises:
            OSError: the first time the stream turns out to be closed.
        """
        left = self._time_left(row)
        if keys := valid_losses(row):
            self._valid = _number(row, keys[0])
        if self._stream is None:
            return
        try:
            with HEART.paused():
                if self._live is not None:
                    self._live.show(int(_number(row, "step")), self._long(row, left), self._short(row, left))
                else:
                    self._stream.write(self._long(row, left) + "\n")
                    self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream object itself was closed
            self._fall_silent()
            raise OSError(f"standard output is gone ({error})") from error

    def close(self) -> None:
        """Leave the last state of the live line on the screen."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _time_left(self, row: Mapping[str, Value]) -> float:
        """Return the seconds left, from the mean step time so far; a row counts the steps since the one before."""
        step = int(_number(row, "step"))
        steps = step - self._last_step if self._last_step is not None else 1
        self._last_step = step
        self._steps += steps
        self._seconds += steps * _number(row, "step_time")
        return (self._total - step) * self._seconds / self._steps if self._steps > 0 else math.nan

    def _short(self, row: Mapping[str, Value], left: float) -> str:
        valid = f"  valid {self._valid:.4f}" if self._valid is not None else ""
        speed = f"{_number(row, 'tokens_per_second'):,.0f} tok/s"
        return f"loss {_number(row, 'loss'):.4f}{valid}  {speed}  {clock_text(left)} left"

    def _long(self, row: Mapping[str, Value], left: float) -> str:
        parts = [f"step {row['step']}/{self._total}", f"loss {_number(row, 'loss'):.4f}"]
        parts += [f"valid{key.removeprefix(VALID_LOSS)} {_number(row, key):.4f}" for key in valid_losses(row)]
        parts += [f"norm {_number(row, 'grad_norm'):.3g}", f"lr {_number(row, 'lr'):.3e}"]
        if row.get("skipped"):
            parts.append(f"skipped {row['skipped']}")
        parts += [f"{_number(row, 'tokens_per_second'):,.0f} tok/s", f"{_number(row, 'tflops_per_device'):.3g} TFLOP/s"]
        if row.get("mfu") is not None:
            parts.append(f"mfu {100 * _number(row, 'mfu'):.1f}%")
        return "  ".join([*parts, f"{_number(row, 'step_time'):.3g} s/step", f"{clock_text(left)} left"])

    def _fall_silent(self) -> None:
        stream, self._stream = self._stream, None
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError, ValueError):
                live.stop()
        # The interpreter flushes standard output when it exits, and a failure there would turn exit code 0 into 120.
        # What is still in its buffer has no reader, so it goes nowhere.
        with contextlib.suppress(OSError, ValueError):
            if stream is sys.stdout and stream is not None:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


class _Terminal(Console):
    """A console that stops writing when the pipe breaks, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader is gone")


class _Live:
    """The live line, redrawn when a row comes, and by the heartbeat while the next one is awaited."""

    def __init__(self, total_steps: int, stream: TextIO):
        self._progress = Progress(
            BarColumn(bar_width=12),
            TextColumn("{task.completed}/{task.total}  {task.description}", markup=False),
            console=_Terminal(file=stream),
            auto_refresh=False,
        )
        self._task: TaskID | None = None
        self._text = ""
        self._total = total_steps

    def show(self, step: int, line: str, text: str) -> None:
        """Print a line for good, and redraw the live line below it."""
        if self._task is None:
            self._task = self._progress.add_task(text, total=self._total, completed=step)
            self._progress.start()
            HEART.show_on(self._beat)
        self._text = text
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._progress.update(self._task, completed=step, description=text, refresh=True)

    def stop(self) -> None:
        HEART.show_on(None)
        if self._task is not None:
            self._progress.update(self._task, description=self._text)
        self._progress.stop()

    def _beat(self, words: str) -> None:
        assert self._task is not None, "shown before"
        self._progress.update(self._task, description=f"{self._text}  {words}", refresh=True)


def _number(row: Mapping[str, Value], key: str) -> float:
    """Return the value, or nan where the row has none."""
    value = row.get(key)
    return math.nan if value is None or isinstance(value, dict) else float(value)
