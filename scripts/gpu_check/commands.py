"""Run a command of the check in a process of its own, with a limit and a log."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LAST_S = 5  # from SIGTERM to SIGKILL


def python(words: Sequence[object], log: Path, limit: float, device: torch.device, **environment: str) -> str:
    """Run Python in the repository, and print what it said; return "", or what was wrong and its last line.

    Args:
        log: the file for its output.
        limit: seconds after which it is ended.
        device: a CPU: no GPU is shown to it.
        environment: variables that are set for it.
    """
    return run([sys.executable, *words], log, limit, device, **environment)


def run(words: Sequence[object], log: Path, limit: float, device: torch.device, **environment: str) -> str:
    """Run any command as `python` does."""
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
