"""A run's folder belongs to one run, from its start."""

from pathlib import Path

import pytest

from megazero.errors import UserError
from megazero.run_folder import RunFolder
from megazero.run_lock import RunLock


def test_a_second_run_is_refused_from_the_first_s_start(tmp_path: Path) -> None:
    assert create(tmp_path / "run", resume=False).is_file()
    with pytest.raises(UserError, match=r"MZ-110 .*holds a run already .*go on with checkpoint.resume=auto"):
        create(tmp_path / "run", resume=False)
    assert not (tmp_path / "run/lock").exists()
    create(tmp_path / "run", resume=True)


def create(path: Path, *, resume: bool) -> Path:
    """A job that has the folder for a moment; its metrics."""
    folder = RunFolder(path)
    lock = RunLock(folder.lock)
    folder.create(lock, resume=resume)
    lock.release()
    return folder.metrics


def test_while_a_job_trains_there_no_other_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    lock = RunLock(folder.lock)
    folder.create(lock, resume=True)
    for resume in (False, True):
        with pytest.raises(UserError, match="MZ-420"):
            create(folder.path, resume=resume)
    assert lock.held
    lock.release()


def test_a_run_that_ended_before_its_first_row_gives_the_folder_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    create(folder.path, resume=False)
    folder.release()
    create(folder.path, resume=False)
    folder.metrics.write_text('{"step": 1}\n')
    folder.release()
    assert folder.metrics.exists()
    with pytest.raises(UserError, match="MZ-110"):
        create(folder.path, resume=False)
