"""A run's folder belongs to one run, from its start."""

from pathlib import Path

import pytest

from megazero.errors import UserError
from megazero.run_folder import RunFolder


def test_a_second_run_is_refused_from_the_first_s_start(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").create()
    with pytest.raises(UserError, match=r"MZ-110 .*holds a run already"):
        RunFolder(tmp_path / "run").create()


def test_a_run_that_ended_before_its_first_row_gives_the_folder_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.release()
    folder.create()
    folder.metrics.write_text('{"step": 1}\n')
    folder.release()
    assert folder.metrics.exists()
    with pytest.raises(UserError, match="MZ-110"):
        folder.create()


def test_the_newest_checkpoint_is_the_largest_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="MZ-402"):
        folder.newest_checkpoint()
    for name in ("step_00000009", "step_00000100", "step_x", ".step_00000999.tmp"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert folder.newest_checkpoint().name == "step_00000100"
    assert folder.checkpoint(123456789).name == "step_123456789"
