"""A run's folder belongs to one run, from its start."""

import os
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from tests.tiny_run import TinyData, command


def test_a_second_run_is_refused_from_the_first_s_start(tmp_path: Path) -> None:
    create(tmp_path / "run", resume=False).touch()
    with pytest.raises(UserError, match=r"MZ-110 .*holds a run already .*go on with checkpoint.resume=auto"):
        create(tmp_path / "run", resume=False)
    assert not (tmp_path / "run/lock").exists()
    create(tmp_path / "run", resume=True)


def create(path: Path, *, resume: bool) -> Path:
    """A job that has the folder for a moment; its metrics."""
    folder = RunFolder(path)
    lock = RunLock(folder.lock)
    try:
        folder.create(lock, resume=resume)
    finally:
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
    create(folder.path, resume=False)
    folder.metrics.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="MZ-110"):
        create(folder.path, resume=False)


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/rank_00.log", "config.yaml"])
def test_a_fifo_in_the_place_of_a_file_of_the_run(tiny_data: TinyData, tmp_path: Path, name: str) -> None:
    """It would block whoever opens it, for ever; a file that is replaced as a whole is a file again."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    os.mkfifo(run / name)
    options = ("run.steps=1", "data.valid=null", "checkpoint.resume=auto")
    done = command("train.py", "--config", tiny_data.config, f"run.dir={run}", *options)
    if name == "config.yaml":
        assert done.returncode == 0 and (run / name).is_file()
    else:
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert "MZ-401" in done.stderr and "expected a regular file, got a FIFO" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_name_that_no_disk_takes(tiny_data: TinyData, tmp_path: Path, ranks: int) -> None:
    """The line has room for what is wrong, however long the name is."""
    name = tmp_path / ("a" * 300)
    done = command("train.py", "--config", tiny_data.config, f"run.dir={name}", f"parallel.tensor={ranks}")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and len(done.stderr) <= 301, done.stderr
    assert done.stderr.startswith("MZ-401") and "File name too long" in done.stderr and "aaa…aaa" in done.stderr
    assert not list(tmp_path.iterdir())
