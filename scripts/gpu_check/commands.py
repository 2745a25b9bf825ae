"""Run a command of the check in its own process, with a time limit and a log."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LAST_S = 5  # seconds from SIGTERM to SIGKILL


def python(words: Sequence[object], log: Path, limit: float, device: torch.device, **environment: str) -> str:
    """Run Python in the repository and print its output; return "", or the fault and its last line of output.

    Args:
        words: arguments of Python.
        log: the file for its output.
        limit: seconds after which it is stopped.
        device: if it is a CPU, GPUs are hidden from the process.
        environment: additional environment variables.
    """
    return run([sys.executable, *words], log, limit, device, **environment)


def run(words: Sequence[object], log: Path, limit: float, device: torch.device, **environment: str) -> str:
    """Run any command; arguments and result as in `python`."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    variables = {"OMP_NUM_THREADS": "1"} | hidden | environment
    line = ["env", *(f"{name}={value}" for name, value in variables.items()), *map(str, words)]
    fault = ""
    with log.open("wb") as out:
        process = subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            fault = f"not done within {limit} s"
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_S)
        finally:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace").rstrip()
    print(text, flush=True)
    last = text.splitlines()[-1] if text else "it said nothing"
    fault = fault or (f"ended with {process.returncode}" if process.returncode else "")
    return f"{fault}: {last}" if fault else ""
