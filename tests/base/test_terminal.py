"""What the verbs print fits a terminal of 60 columns, and is whole in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from megazero.base import terminal
from megazero.config.file import load
from megazero.tools.certify.certify import Row
from megazero.tools.certify.report import table
from megazero.tools.doctor.doctor import Diagnosis, as_text
from megazero.tools.doctor.finding import Finding
from tests.layouts import job_on
from tests.tiny_run import ROOT

COLUMNS = 60


def on_terminal(*words: str) -> list[str]:
    """Lines that a verb prints on a terminal of COLUMNS columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    line = [sys.executable, "-m", "megazero", *words]
    process = subprocess.Popen(line, cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(120) == 0, said
    return b"".join(parts).decode().splitlines()


TINY = ("--config", "tiny", "batch.micro=1")
VERBS = [
    ("plan", "--config", "gpt170b", "--gpus", "400", "--hardware", "v100-32gb"),
    ("plan", "--config", "gpt13b", "--gpus", "64", "--hardware", "a100-80gb", "parallel.pipeline=8"),
    ("plan", "--config", "gpt13b", "--gpus", "8", "--hardware", "a100-80gb", "--search"),
    ("explain", "--config", "tiny"),
    ("schedule", *TINY, "parallel.pipeline=4", "pipeline.schedule=zb-v", "model.layers=14", "zero.stage=3"),
    ("simulate", *TINY, "--gpus", "4", "parallel.tensor=2", "zero.stage=3", "--device", "cpu", "batch.global=4"),
]


@pytest.mark.parametrize("words", VERBS[2:-1], ids=lambda words: f"{words[0]}-{words[2]}")
def test_a_terminal_of_60_columns_is_enough(words: tuple[str, ...]) -> None:
    lines = on_terminal(*words)
    assert len(lines) > 10 and [line for line in lines if len(line) > COLUMNS] == []


@pytest.mark.full
@pytest.mark.parametrize("words", [*VERBS[:2], VERBS[-1]], ids=lambda words: f"{words[0]}-{words[2]}")
def test_the_longer_ones_do_too(words: tuple[str, ...]) -> None:
    test_a_terminal_of_60_columns_is_enough(words)


def test_tables_of_certify_and_doctor_fit_too() -> None:
    how = {"sequence": True, "stage": 3, "pipeline": 2, "schedule": "interleaved", "chunks": 2}
    layout = job_on(2, 2, **how)
    measures = ("loss", "gradient norm", "first gradients", "weights", "first moment", "update", "size of updates")
    row = Row(layout=layout, bitwise=False, times={"loss": 0.5}, worst=dict.fromkeys(measures, 1.2e-13))
    fine = Row(layout=job_on(), bitwise=True, times={"loss": 0.0})
    lines = table([row, fine], load("tiny", ["batch.micro=1"]), 4).splitlines()
    assert max(map(len, lines)) <= COLUMNS and "1e-13" in lines[-3]
    found = Diagnosis({"machine": [Finding("load", "many words " * 20, "absent", "do " * 40)]}, "not measured")
    lines = terminal.fitted(as_text(found), COLUMNS).splitlines()
    assert max(map(len, lines)) <= COLUMNS and len(lines) > 5


def test_a_pipe_gets_whole_lines() -> None:
    assert terminal.fitted("word " * 100, None) == "word " * 100
    line = [sys.executable, "-m", "megazero", "explain", "data.train"]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert max(map(len, said)) > 80
