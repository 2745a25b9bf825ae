"""The whole way on one machine: text, tokenizer, token files, training, a sample (`make quickstart`).

Trains configs/tiny.yaml into a fresh numbered folder runs/quickstart_N, on two local ranks with ZeRO stage 2 (on one
where there is one GPU). Extra arguments are overrides for the training run, e.g.
`python scripts/quickstart.py run.steps=20`.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def "
STAGE_2 = ["zero.stage=2", "batch.micro=4"]


def main(overrides: list[str]) -> int:
    python = sys.executable
    folder = fresh_folder(ROOT / "runs")
    commands = [
        [python, "scripts/quickstart_data.py"],
        [python, "train.py", "--config", "tiny.yaml", "--nproc", ranks(), *STAGE_2, f"run.dir={folder}", *overrides],
        [python, "-m", "megazero", "generate", "--run", str(folder), "--prompt", PROMPT],
    ]
    for title, command in zip(("data", "training", f"sample after {PROMPT!r}"), commands, strict=True):
        print(f"--- {title}", flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


def ranks() -> str:
    """Two, unless they would share a GPU."""
    import torch

    return "1" if torch.cuda.device_count() == 1 else "2"


def fresh_folder(runs: Path) -> Path:
    """runs/quickstart_N with the smallest N that does not exist, as a path from the root."""
    number = 1
    while (runs / f"quickstart_{number}").exists():
        number += 1
    return (runs / f"quickstart_{number}").relative_to(ROOT)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the command that ran has said so
        sys.exit(130)
