"""One job per run directory: who is refused, who takes over, and who finds out."""

import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.run import lock as lock_module
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from tests.processes import alive as is_alive
from tests.processes import until


def in_a_process(action: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=action)
    process.start()
    return process


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_living_owner_is_named(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock", job="17")
    assert lock.take() is None and lock.held
    with pytest.raises(
        UserError, match=rf"MZ-420 .*process {os.getpid()} on {socket.gethostname()}, job 17, since 20"
    ) as e:
        RunLock(tmp_path / "lock").take()
    assert len(str(e.value)) <= 300 and e.value.exit_code == 1
    lock.release()
    assert not list(tmp_path.iterdir())
    assert RunLock(tmp_path / "lock").take() is None


def test_a_dead_owner_s_lock_is_taken_over(tmp_path: Path) -> None:
    process = in_a_process(lambda: (RunLock(tmp_path / "lock").take(), os._exit(0)))
    process.join()
    lock = RunLock(tmp_path / "lock")
    assert f"process {process.pid} on" in (lock.take() or "") and lock.held
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_process_of_the_same_number_is_another(tmp_path: Path) -> None:
    RunLock(tmp_path / "lock").take()
    rewrite(tmp_path / "lock", born="1")
    assert RunLock(tmp_path / "lock").take() is not None


def test_a_process_that_ended_and_was_not_waited_for_is_dead(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        try:
            RunLock(tmp_path / "lock").take()
        finally:
            os._exit(0)
    until(lambda: not is_alive(pid))
    assert RunLock(tmp_path / "lock").take() is not None
    os.waitpid(pid, 0)


@pytest.mark.parametrize("alive", [True, False])
def test_on_another_host_a_touch_is_life(tmp_path: Path, alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its clock says: here it is a day ahead."""
    monkeypatch.setattr(lock_module, "_TOUCH", 0.05)
    monkeypatch.setattr(lock_module, "_WATCH", 60.0 if alive else 0.3)  # who lives is seen at the first touch
    owner = RunLock(tmp_path / "lock")
    owner.take()
    owner._released.set()
    time.sleep(0.1)
    rewrite(tmp_path / "lock", host="elsewhere")
    os.utime(tmp_path / "lock", (time.time() + 86400,) * 2)

    def touch() -> None:
        for second in range(1000):
            os.utime(tmp_path / "lock", (time.time() + 86400 + second,) * 2)
            time.sleep(0.02)

    toucher = in_a_process(touch) if alive else None
    lock = RunLock(tmp_path / "lock")
    if toucher is None:
        assert "on elsewhere" in (lock.take() or "")
        return
    with pytest.raises(UserError, match=r"MZ-420 .* on elsewhere"):
        lock.take()
    toucher.kill()
    toucher.join()


def test_who_has_lost_it_knows_and_leaves_it_alone(tmp_path: Path) -> None:
    one, other = RunLock(tmp_path / "lock"), RunLock(tmp_path / "lock")
    one.take()
    rewrite(tmp_path / "lock", pid=2**22 + 1, born="1")
    other.take()
    assert not one.held and other.held
    one.release()
    assert other.held


@pytest.mark.parametrize("dead", [True, False])
def test_of_many_newcomers_one_wins(tmp_path: Path, dead: bool) -> None:
    for round_ in range(8):
        folder = tmp_path / str(round_)
        folder.mkdir()
        if dead:
            RunLock(folder / "lock").take()
            rewrite(folder / "lock", pid=2**22 + 1, born="1")

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


def test_a_living_job_s_folder_is_not_called_a_run_to_remove(tmp_path: Path) -> None:
    """A second job that is not meant to go on hears of the first one, not that it may remove the folder."""
    folder, lock = RunFolder(tmp_path / "run"), RunLock(tmp_path / "run/lock")
    assert folder.create(lock, resume=False) is None
    with pytest.raises(UserError, match="MZ-420"):
        folder.create(RunLock(folder.lock), resume=False)
    lock.release()
    with pytest.raises(UserError, match="MZ-110"):
        folder.create(RunLock(folder.lock), resume=False)


def test_another_space_of_processes_is_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with the same name: whether its owner lives, the numbers of processes here do not tell."""
    monkeypatch.setattr(lock_module, "_TOUCH", 0.05)
    monkeypatch.setattr(lock_module, "_WATCH", 0.4)
    owner = RunLock(tmp_path / "lock")
    owner.take()
    rewrite(tmp_path / "lock", kernel="elsewhere", pid=2**22 + 1)
    word = json.loads((tmp_path / "lock").read_text())["word"]
    assert word == owner.word and owner.held  # it goes on touching
    with pytest.raises(UserError, match=r"MZ-420"):
        RunLock(tmp_path / "lock").take()
    owner._released.set()


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '{"word": "x"}'])
def test_what_is_no_lock_of_ours_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with pytest.raises(UserError, match=r"MZ-420 .*lock: is no lock of ours, or damaged; remove it"):
        RunLock(tmp_path / "lock").take()
    assert (tmp_path / "lock").read_text() == content


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        RunLock(tmp_path / "gone" / "lock").take()


@pytest.mark.parametrize("kind", ["link to itself", "link to a device", "FIFO", "folder"])
def test_what_cannot_be_read_is_not_ours(tmp_path: Path, kind: str) -> None:
    """Only a job that has taken the lock gives a disk that does not answer the benefit of the doubt."""
    path = tmp_path / "lock"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if "device" in kind else path)
    lock = RunLock(path)
    with pytest.raises(UserError, match=r"MZ-420 .*is no lock of ours, or damaged"):
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
