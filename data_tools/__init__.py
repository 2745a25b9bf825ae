"""Commands that make and check token files: train_tokenizer, preprocess, inspect, merge.

Each is a verb of megazero, runs as `python data_tools/NAME.py` too, and offers `main(argv) -> exit code`. They share
command (options, errors, exit codes), corpus (reading text), encoding (text to ids in worker processes).
"""

import sys
from pathlib import Path


def begin(script: str) -> None:
    """Begin a command, which from here on is never silent for long; end it where a package is missing."""
    from megazero.base.heartbeat import HEART
    from megazero.base.packages import require

    require()
    HEART.begin(sys.stderr, f"starting {Path(script).name}")
