"""The console: what a person reads, on a terminal, in a file, and after the reader has gone."""

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.observe.console import ConsoleSink, clock_text

ROOT = Path(__file__).parents[2]


def row(step: int, **values) -> dict:
    plain = {"step": step, "tokens": 64 * step, "loss": 4.0 / step, "grad_norm": 1.25, "lr": 3e-4, "skipped": 0}
    rates = {"step_time": 2.0, "tokens_per_second": 12345.6, "tflops_per_device": 0.5, "mfu": None}
    return {**plain, **rates, **values}


def test_plain_lines():
    stream = io.StringIO()
    sink = ConsoleSink(100, stream)
    sink.row(row(10))
    sink.row(row(20, valid_loss=3.5, mfu=0.412, skipped=3))
    sink.close()
    first, second = stream.getvalue().splitlines()
    assert first == (
        "step 10/100  loss 0.4000  norm 1.25  lr 3.000e-04  12,346 tok/s  0.5 TFLOP/s  2 s/step  3:00 left"
    )
    assert "valid 3.5000" in second
    assert "mfu 41.2%" in second
    assert "skipped 3" in second
    assert second.endswith("2:40 left")
    assert stream.getvalue().isascii()


def test_time_left_is_the_mean_of_all_steps_so_far():
    stream = io.StringIO()
    sink = ConsoleSink(100, stream)
    sink.row(row(50, step_time=1.0))  # resumed: the steps before are not ours
    sink.row(row(53, step_time=5.0))
    assert stream.getvalue().splitlines()[-1].endswith(f"{clock_text(47 * (1 + 15) / 4)} left")


def test_non_finite_numbers_are_shown():
    stream = io.StringIO()
    ConsoleSink(10, stream).row(row(1, loss=math.nan, grad_norm=math.inf))
    assert "loss nan" in stream.getvalue()
    assert "norm inf" in stream.getvalue()


def test_no_stream_is_silence():
    sink = ConsoleSink(10, None)
    sink.row(row(1))
    sink.close()


SCRIPT = """
import sys
from megazero.base.answers import flush_output
from megazero.observe.console import ConsoleSink
from megazero.observe.sinks import Sinks
sinks = Sinks([ConsoleSink(1000, sys.stdout)])
row = dict(step=0, loss=1.0, grad_norm=1.0, lr=1.0, step_time=1.0, tokens_per_second=1.0, tflops_per_device=1.0)
for step in range(1, 1001):
    sinks.row({**row, "step": step})
sinks.close()
flush_output()
print("done", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "stdout",
    [
        "pipe without a reader",
        pytest.param("closed before the start", marks=pytest.mark.full),
        pytest.param("full disk", marks=pytest.mark.full),
    ],
)
def test_process_outlives_its_standard_output(stdout):
    command = [sys.executable, "-c", SCRIPT]
    redirect = {"closed before the start": " >&-", "full disk": " >/dev/full"}.get(stdout)
    if redirect:
        command = ["/bin/sh", "-c", 'exec "$@"' + redirect, "sh", *command]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    *warnings, last = process.stderr.splitlines()
    assert (process.returncode, last) == (0, "done")
    assert len(warnings) == (0 if stdout == "closed before the start" else 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "1d 1:01:01"), (math.inf, "?")],
)
def test_clock(seconds, text):
    assert clock_text(seconds) == text
