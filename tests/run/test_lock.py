"""One job per run directory: who is refused, who takes over, and who finds out."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from tests.processes import alive as is_alive
from tests.processes import until


def in_a_process(action: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=action)
    process.start()
    return process


def test_a_living_owner_is_named(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock", job="17")
    assert lock.take() is None and lock.held
    with pytest.raises(
        UserError, match=rf"MZ-420 .*process {os.getpid()} on {socket.gethostname()}, job 17, since 20"
    ) as e:
        RunLock(tmp_path / "lock").take()
    with pytest.raises(UserError, match=r"MZ-420 .*job 17"):
        RunLock(tmp_path / "lock").refuse_if_held()
    assert len(str(e.value)) <= 300 and e.value.exit_code == 1
    lock.release()
    assert not list(tmp_path.iterdir()) and not lock.held
    assert RunLock(tmp_path / "lock").take() is None


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_dead_owner_s_lock_is_taken_over(tmp_path: Path, waited_for: bool) -> None:
    """Also of a process that ended and was not waited for."""
    pid = os.fork()
    if not pid:
        try:
            RunLock(tmp_path / "lock").take()
        finally:
            os._exit(0)
    until(lambda: not is_alive(pid))
    if waited_for:
        os.waitpid(pid, 0)
    RunLock(tmp_path / "lock").refuse_if_held()
    lock = RunLock(tmp_path / "lock")
    assert f"process {pid} on" in (lock.take() or "") and lock.held
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    if not waited_for:
        os.waitpid(pid, 0)


def test_a_stopped_owner_keeps_it(tmp_path: Path) -> None:
    process = in_a_process(lambda: (RunLock(tmp_path / "lock").take(), (tmp_path / "taken").touch(), time.sleep(60)))
    until((tmp_path / "taken").exists)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=rf"MZ-420 .*process {process.pid} on"):
        RunLock(tmp_path / "lock").take()
    process.kill()
    process.join()
    assert RunLock(tmp_path / "lock").take() is not None


def test_who_has_lost_it_knows_and_leaves_it_alone(tmp_path: Path) -> None:
    one, other = RunLock(tmp_path / "lock"), RunLock(tmp_path / "lock")
    one.take()
    (tmp_path / "lock").unlink()
    assert not one.held and "was removed" in (one.loss() or "")
    other.take()
    assert not one.held and other.held and "another job took" in (one.loss() or "")
    one.release()
    assert other.held
    other.release()
    assert not list(tmp_path.iterdir())


def test_a_process_that_was_forked_does_not_keep_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock")
    lock.take()
    process = in_a_process(lambda: time.sleep(60))
    lock.release()
    assert RunLock(tmp_path / "lock").take() is None
    process.kill()
    process.join()


@pytest.mark.parametrize("dead", [True, False])
def test_of_many_newcomers_one_wins(tmp_path: Path, dead: bool) -> None:
    for round_ in range(4):
        folder = tmp_path / str(round_)
        folder.mkdir()
        if dead:
            in_a_process(lambda folder=folder: (RunLock(folder / "lock").take(), os._exit(0))).join()

        def newcomer(folder: Path = folder) -> None:
            lock, code = RunLock(folder / "lock"), 0
            try:
                lock.take()
                (folder / f"won_{lock.word}").touch()
            except UserError as error:
                code = 2 if error.code == 420 else 4
            (folder / f"tried_{os.getpid()}").touch()
            while len(list(folder.glob("tried_*"))) < 6:  # a winner that has gone would be dead, and taken over
                time.sleep(0.005)
            os._exit(code or (0 if lock.held else 3))

        processes = [in_a_process(newcomer) for _ in range(6)]
        for process in processes:
            process.join()
        assert sorted(process.exitcode or 0 for process in processes) == [0, 2, 2, 2, 2, 2]
        assert len(list(folder.glob("won_*"))) == 1


def test_a_disk_without_locks_has_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = RunLock(tmp_path / "lock")
    assert lock.take() is None and lock.held
    with pytest.raises(UserError, match=r"MZ-420 .*another job trains here: process"):
        RunLock(tmp_path / "lock").take()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_living_job_s_folder_is_not_called_a_run_to_remove(tmp_path: Path) -> None:
    """A second job that is not meant to go on hears of the first one, not that it may remove the folder."""
    folder, lock = RunFolder(tmp_path / "run"), RunLock(tmp_path / "run/lock")
    assert folder.create(lock, resume=False) is None
    folder.metrics.touch()
    with pytest.raises(UserError, match="MZ-420"):
        folder.create(RunLock(folder.lock), resume=False)
    lock.release()
    with pytest.raises(UserError, match="MZ-110"):
        folder.create(RunLock(folder.lock), resume=False)


@pytest.mark.parametrize("content", ["{", "null", "[]", '{"word": "x"}'])
def test_what_is_no_lock_of_ours_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with pytest.raises(UserError, match=r"MZ-420 .*lock: is not a lock file, or damaged; remove it"):
        RunLock(tmp_path / "lock").take()
    assert (tmp_path / "lock").read_text() == content


def test_a_lock_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    owner = {"word": "abc", "host": "node1", "kernel": "k", "pid": 17, "born": "1", "since": "2026-11-01", "job": ""}
    (tmp_path / "lock").write_text(json.dumps(owner))
    assert RunLock(tmp_path / "lock").take() == "process 17 on node1, since 2026-11-01"


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        RunLock(tmp_path / "gone" / "lock").take()


@pytest.mark.parametrize("kind", ["link to itself", "link to a device", "FIFO", "folder"])
def test_what_cannot_be_a_lock_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if "device" in kind else path)
    lock = RunLock(path)
    with pytest.raises(UserError, match=r"MZ-420 .*is not a lock file, or damaged"):
        lock.take()
    lock.release()
    assert path.is_symlink() or path.exists(), "it is another's to remove"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_users_lock_that_may_not_be_read_is_respected(tmp_path: Path) -> None:
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o777)
        mine = RunLock(base / "lock")
        mine.take()
        (base / "lock").chmod(0)

        def other() -> None:
            os.setgid(65534)
            os.setuid(65534)
            theirs = RunLock(base / "lock")
            with pytest.raises(UserError, match="MZ-420"):
                theirs.take()
            theirs.release()

        process = in_a_process(other)
        process.join()
        assert process.exitcode == 0 and (base / "lock").exists()
        mine.release()
    finally:
        shutil.rmtree(base)
