"""Commands that make and check token files: train_tokenizer, preprocess, inspect, merge.

Each is a command of megazero, also runs as `python data_tools/NAME.py`, and offers `main(argv) -> exit code`. They
share command (options, errors, exit codes), corpus (reading text), encoding (text to ids in worker processes).
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn


def run_script(script: str) -> NoReturn:
    """Run the command of a script in this folder, and end the process with the command's exit code.

    A missing package ends the process first. The heartbeat runs during the imports, which take a second on a busy host.
    """
    from megazero.base.heartbeat import HEART
    from megazero.base.packages import require

    require()
    HEART.begin(sys.stderr, f"starting {Path(script).name}")
    sys.exit(import_module(f"data_tools.{Path(script).stem}").main())
