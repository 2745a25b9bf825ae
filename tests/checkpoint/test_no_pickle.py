"""Nothing is unpickled from training to a sample on another grid, nor out to transformers' files and in again: a data
file cannot express code.
"""

from pathlib import Path

import pytest

from tests.tiny_run import TinyData, fresh_command

WATCH = """
import os, pickle, sys
seen = os.open({seen!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(event, arguments):
    if event == "pickle.find_class":
        os.write(seen, (repr(arguments) + "\\n").encode())

sys.addaudithook(note)
from megazero.__main__ import main
for line in {lines!r}:
    assert main(line) == 0, line
os.write(seen, b"now ours:\\n")
pickle.loads(pickle.dumps(Exception))
"""


@pytest.mark.full
def test_training_saving_resuming_resharding_and_exporting_unpickle_nothing(
    tiny_data: TinyData, tmp_path: Path
) -> None:
    """In this process, in forked ranks, and in their threads."""
    train = ["train", "--config", str(tiny_data.config), f"run.dir={tmp_path / 'run'}", "data.valid=0.1"]
    resume = [*train, "checkpoint.resume=auto"]
    lines = [
        [*train, "run.steps=2", "checkpoint.every=1", "checkpoint.async=true", "checkpoint.keep=1"],
        [*resume, "run.steps=3"],
        [*resume, "run.steps=4", "parallel.tensor=2", "zero.stage=3"],
        ["generate", "--run", str(tmp_path / "run"), "--prompt", "def ", "--tokens", "2"],
        ["export", "--to", "hf", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "hf")],
        ["import", "--from", "hf", "--model", str(tmp_path / "hf"), "--out", str(tmp_path / "imported")],
        [*train, f"run.dir={tmp_path / 'on'}", "run.steps=1", f"checkpoint.resume={tmp_path / 'imported'}"],
    ]
    done = fresh_command("-c", WATCH.format(lines=lines, seen=str(tmp_path / "seen")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensor 2" in done.stdout
    before, _, after = (tmp_path / "seen").read_text().partition("now ours:\n")
    assert before == "" and "Exception" in after
