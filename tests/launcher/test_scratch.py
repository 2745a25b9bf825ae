"""Folders in the temporary directory: those of dead processes go, and nothing else does."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from megazero.comm.processes import Process, boot_id
from megazero.launcher.scratch import scratch_folder
from tests import warm
from tests.processes import until_gone

HOLD = """
import sys
from megazero.launcher.scratch import scratch_folder
with scratch_folder(*sys.argv[1:]) as folder:
    (folder / "store").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder(place: Path, *purpose: str) -> tuple[warm.Process, Path]:
    process = warm.Process(["-c", HOLD, *purpose], env=os.environ | {"TMPDIR": str(place)}, stdin=True)
    return process, Path(process.stdout.readline().strip())


def left(place: Path) -> list[Path]:
    return sorted(place.iterdir())


def test_the_next_start_removes_what_killed_ones_left(place: Path):
    killed = [holder(place), holder(place, "certify")]
    living, kept = holder(place)
    for process, _ in killed:
        process.kill()
        process.communicate()
    assert len(left(place)) == 3
    with scratch_folder("doctor") as folder:
        assert left(place) == sorted([kept, folder])
    assert left(place) == [kept] and (kept / "store").read_text() == "x"
    living.communicate()
    assert left(place) == []


def test_a_stopped_owner_is_not_dead(place: Path):
    process, kept = holder(place)
    process.send_signal(signal.SIGSTOP)
    with scratch_folder():
        assert kept.exists()
    process.kill()
    process.communicate()


def name(*, boot: str | None = None, view: int | None = None, pid: int = 0, started: int = 1) -> str:
    boot = boot or boot_id().replace("-", "")
    view = view or os.stat("/proc/self/ns/pid").st_ino
    return f"megazero-{boot}.{view}.{pid or os.getpid()}.{started}.abc"


def test_what_is_not_proven_dead_is_left_alone(place: Path):
    own = Process.own()
    names = [
        name(boot="0" * 32),  # another host's
        name(view=1),  # another container's
        name(started=own.started),  # this process'
        "megazero-abcdefgh",
        "megazero-runs",
        name() + "/..",
    ]
    for kept in names[:-1]:
        (place / kept).mkdir()
    (place / name(pid=own.pid)).write_text("a file")
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "precious").touch()
    (place / name(started=2)).symlink_to("elsewhere")
    before = left(place)
    with scratch_folder() as folder:
        assert left(place) == sorted([*before, folder])
    assert (place / "elsewhere" / "precious").exists()


def test_links_inside_are_not_followed(place: Path):
    (place / "precious").mkdir()
    (place / "precious" / "file").touch()
    dead = place / name()
    dead.mkdir()
    (dead / "link").symlink_to(place / "precious")
    with scratch_folder():
        assert not dead.exists()
    assert (place / "precious" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_other_users_folders_are_left_alone(place: Path):
    theirs = place / name()
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with scratch_folder():
        assert theirs.exists()


def test_two_starters_do_not_disturb_each_other(place: Path):
    for number in range(200):
        (place / name(started=number + 1)).mkdir()
    starters = [holder(place) for _ in range(2)]
    assert left(place) == sorted(folder for _, folder in starters)
    for process, _ in starters:
        process.communicate()
        assert process.returncode == 0


def test_a_killed_parent_leaves_nothing_for_long(place: Path):
    """What a run's parent leaves when it is killed, the next one takes away."""
    for _ in range(2):
        line = ["-m", "tests.launcher.faulty", "sleep", 1, 30, 2]
        process = warm.Process(line, env=os.environ | {"TMPDIR": str(place)})
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.kill()
        process.communicate()
        until_gone(pids)
        assert len(left(place)) == 1
    with scratch_folder():
        pass
    assert left(place) == []
