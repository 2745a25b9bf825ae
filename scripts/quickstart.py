"""Run all steps on one machine: text, tokenizer, token files, training, a sample (`make quickstart`).

Trains configs/quickstart.yaml into a fresh numbered folder runs/quickstart_N, on two local ranks with ZeRO stage 2 (on
one if there is one GPU). Extra arguments are overrides for the training run, e.g.
`python scripts/quickstart.py run.steps=20`.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: import megazero from the repository
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from megazero.base.doing import doing
from megazero.base.heartbeat import HEART

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.path.relpath(sys.executable, ROOT) if ROOT in Path(sys.executable).parents else sys.executable
PROMPT, TEMPERATURE = "def __init__(self,", "0.7"
GENERATE = ["-m", "megazero", "generate"]
STAGE_2 = ["zero.stage=2"]
STOPPED = 75  # the exit code of a run that a signal has stopped and that can be resumed


def main(overrides: list[str]) -> int:
    folder = fresh_folder(ROOT / "runs")
    if code := run("data", "scripts/quickstart_data.py"):
        return code
    training = [
        "train.py",
        "--config",
        "quickstart.yaml",
        *STAGE_2,
        f"run.dir={folder}",
        *overrides,
        "--nproc",
        ranks(),
    ]
    about = f"training, five minutes on two cores; with fewer steps: {PYTHON} scripts/quickstart.py run.steps=100"
    if code := run(about, *training):
        if code == STOPPED:
            print(f"go on with: {PYTHON} {shlex.join([*training, 'checkpoint.resume=auto'])}", flush=True)
        return code
    sample = ["--run", folder, "--prompt", PROMPT, "--temperature", TEMPERATURE]
    return run(f"sample after {PROMPT!r}", *GENERATE, *sample)


def run(title: str, *command: object) -> int:
    """Run a Python command from the root; return its exit code. SIGTERM to this process stops the command too."""
    print(f"--- {title}", flush=True)
    with subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def ranks() -> str:
    """Return the number of ranks, as text: two, or one if two would share a GPU."""
    HEART.begin(sys.stdout, "quickstart")
    try:
        with doing("looking for GPUs"):
            import torch

            return "1" if torch.cuda.device_count() == 1 else "2"
    finally:
        HEART.end()


def fresh_folder(runs: Path) -> Path:
    """Return runs/quickstart_N with the smallest N that does not exist, as a path from the root."""
    number = 1
    while (runs / f"quickstart_{number}").exists():
        number += 1
    return (runs / f"quickstart_{number}").relative_to(ROOT)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the running command has reported it
        sys.exit(130)
