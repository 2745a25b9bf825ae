"""The quickstart's commands end with it."""

import signal
import subprocess
import sys

import pytest

from tests.processes import until_gone
from tests.tiny_run import ROOT

CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
MAIN = f"import sys; from scripts.quickstart import run; sys.exit(run('a command', '-c', {CHILD!r}))"


@pytest.mark.usefixtures("usual_signals")
def test_who_ends_it_ends_the_command_that_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", MAIN], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "--- a command\n"
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    until_gone([child])
