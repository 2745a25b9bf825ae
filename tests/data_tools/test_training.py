"""The trainer's process: what happens when it dies."""

import subprocess
import sys
from pathlib import Path

from tests.warm import ROOT

# The child of a script without a guard runs the script again while it starts, and dies there: before it reads anything.
SCRIPT = """
from data_tools.training import TrainingError, train_apart

try:
    train_apart(["x" * 1_000_000], 300)
except TrainingError as error:
    print(error)
"""


def test_a_child_that_dies_before_it_reads_is_said(tmp_path: Path) -> None:
    """The sample is larger than what a pipe holds."""
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT)})
    assert "its process died" in done.stdout, done.stderr
