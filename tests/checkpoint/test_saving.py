"""Saving: whole or not at all, in the background as in the foreground, and never at the price of what is saved."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from megazero.base.errors import UserError
from megazero.checkpoint import save, shard, snapshot, store
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.pieces import Piece
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.retention import retire, verify
from megazero.checkpoint.store import Store
from megazero.comm.grid import single
from megazero.run.folder import RunFolder
from megazero.tools.training.launch import launch
from tests.tiny_run import TinyData, command

OPTIONS = ("run.steps=4", "data.valid=null", "checkpoint.every=1", "model.dropout=0.1")


def steps(folder: Path) -> list[int]:
    return Store(folder / "checkpoints").steps()


def check_whole(folder: Path) -> None:
    for step in steps(folder):
        verify(Store(folder / "checkpoints").path(step))
    assert not list((folder / "checkpoints").glob(".step_*")) and not (folder / "lock").exists()


@pytest.fixture(scope="module")
def whole(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint behind each of its four steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert launch(tiny_data.load(folder, *OPTIONS), "small", 1) == 0
    check_whole(folder)
    assert steps(folder) == [4, 3, 2, 1]
    return folder


def same(one: Path, other: Path) -> None:
    for step in steps(one):
        a, b = (Store(folder / "checkpoints").path(step) / "shard_00000.safetensors" for folder in (one, other))
        assert a.read_bytes() == b.read_bytes(), step


@pytest.mark.parametrize("slow", ["copy", "commit", pytest.param("write", marks=pytest.mark.full)])
def test_in_the_background_the_same_is_saved(
    tiny_data: TinyData, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """However slow it is: updates wait for the copy, the next save for the one before."""
    name, module = {"copy": ("copy_all", snapshot), "write": ("write_shard", save), "commit": ("replace_file", store)}[
        slow
    ]
    honest, threads = getattr(module, name), set()

    def late(*arguments):
        threads.add(threading.current_thread().name)
        time.sleep(0.1)
        return honest(*arguments)

    monkeypatch.setattr(module, name, late)
    assert launch(tiny_data.load(tmp_path / "run", *OPTIONS, "checkpoint.async=true"), "small", 1) == 0
    assert threads == {"saver_0"}
    assert steps(tmp_path / "run") == [4, 3, 2, 1]
    check_whole(tmp_path / "run")
    same(whole, tmp_path / "run")


def test_a_step_may_be_committed_as_soon_as_the_last_part_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is held up right behind the rename of its part finds the folder under another name."""
    place, honest = Store(tmp_path / "checkpoints", "token"), Path.replace

    def replace(path: Path, target: Path) -> Path:
        done = honest(path, target)
        if target.name == "part_00000.json":
            place.staging(1).rename(place.path(1))
        return done

    monkeypatch.setattr(Path, "replace", replace)
    piece = Piece("a", 0, 4, 0)
    holdings = [save.ShardState([piece], {kind: torch.ones(4) for kind in ("weight", "exp_avg", "exp_avg_sq")})]
    world, cpu = single()["world"], torch.device("cpu")
    saver = save.Checkpoints(place, holdings, world, cpu, every=None, background=True, conclude=None, tidy=None)
    saver.save(1, Progress(updates=1, skipped=0, overflows=0, next_sample=8, loss_scale=None, good_steps=0))
    saver.finish()
    saver.close()
    assert place.steps() == [1]


class Full:
    """A disk that is full from the n-th call on of what writes to it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int):
        self.calls, self.at = 0, at
        for module, name in (
            (shard, "write_all"),
            (shard, "flush"),
            (save, "flush_folder"),
            (save, "announce_file"),
            (store, "replace_file"),
            (store, "flush_folder"),
        ):
            patch.setattr(module, name, self._spoilt(getattr(module, name)))

    def _spoilt(self, honest):
        def write(*arguments):
            self.calls += 1
            if self.calls >= self.at:
                raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))
            return honest(*arguments)

        return write


@pytest.mark.parametrize("background", [pytest.param("false", marks=pytest.mark.full), "true"])
def test_a_full_disk_costs_nothing_that_is_saved(tiny_data: TinyData, whole: Path, tmp_path: Path, background: str):
    """At every single write of the second save."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Full(patch, 10**9)
        assert launch(tiny_data.load(tmp_path / "count", *OPTIONS, "run.steps=1"), "small", 1) == 0
    writes = counted.calls
    assert writes >= 5
    for at in range(writes + 1, 2 * writes + 1):
        run = tmp_path / str(at)
        config = tiny_data.load(run, *OPTIONS, f"checkpoint.async={background}")
        with pytest.MonkeyPatch.context() as patch:
            Full(patch, at)
            with pytest.raises(
                UserError, match=r"^MZ-403 .*No space left on device; earlier ones are intact"
            ) as caught:
                launch(config, "small", 1)
        assert len(str(caught.value)) <= 300 and caught.value.exit_code == 1
        # Its last write makes a rename durable that has happened: then the step is there, and whole.
        assert steps(run) == ([2, 1] if at == 2 * writes else [1]), at
        check_whole(run)
        if at % 3 == 0:
            again = tiny_data.load(run, *OPTIONS, "checkpoint.resume=auto")
            assert launch(again, "small", 1) == 0
            same(run, whole)


def test_a_real_full_disk(tiny_data: TinyData, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=3m none {disk} 2> /dev/null"):
        pytest.skip("nothing can be mounted here")
    try:
        line = ("train.py", "--config", tiny_data.config, f"run.dir={disk / 'run'}", *OPTIONS, "run.steps=9")
        done = command(*line, "parallel.tensor=2", "checkpoint.async=true")
        assert done.returncode == 1 and done.stderr.startswith("MZ-403 rank=") and done.stderr.count("\n") == 1
        assert "No space left on device" in done.stderr and steps(disk / "run")[:1] >= [2]
        check_whole(disk / "run")
        again = command(*line, "checkpoint.resume=auto")
        assert again.returncode == 1 and "expected room for 0.00136 GB of checkpoints" in again.stderr
        os.system(f"mount -o remount,size=9m {disk}")
        again = command(*line, "parallel.tensor=2", "checkpoint.keep=1", "checkpoint.resume=auto")
        assert (again.returncode, again.stderr) == (0, "") and steps(disk / "run") == [9]
    finally:
        os.system(f"umount {disk}")


def test_a_disk_that_is_too_small_is_found_before_the_first_step(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = 56_800 * 12
    for room, every, fits in (
        (one, "null", True),
        (one - 1, "null", False),
        (2 * one - 1, "2", False),
        (2 * one, "2", True),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, room=room: shutil._ntuple_diskusage(0, 0, room))
        config = tiny_data.load(tmp_path / f"{room}", "run.steps=1", "data.valid=null", f"checkpoint.every={every}")
        if fits:
            assert launch(config, "small", 1) == 0
            continue
        with pytest.raises(
            UserError, match=r"MZ-403 .*expected room for 0.00\d+ GB of checkpoints \(0.000682 GB each\)"
        ):
            launch(config, "small", 1)


def test_values_that_are_no_numbers_are_not_saved(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megazero.optim.mixture import Mixture

    honest, calls = Mixture.update, []

    def update(self, unit, **options):
        honest(self, unit, **options)
        calls.append(unit)
        if len(calls) == 6:  # of five units, in the second step
            self.runs(unit)[0].state["exp_avg_sq"][5] = float("inf")

    monkeypatch.setattr(Mixture, "update", update)
    with pytest.raises(
        UserError,
        match=r"MZ-302 .*step=2 .*not saved: exp_avg_sq of embedding.tokens.weight is not finite .*; earlier steps",
    ):
        launch(tiny_data.load(tmp_path / "run", *OPTIONS), "small", 1)
    assert steps(tmp_path / "run") == [1]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_are_kept(tiny_data: TinyData, tmp_path: Path, keep: int) -> None:
    assert launch(tiny_data.load(tmp_path / "run", *OPTIONS, f"checkpoint.keep={keep}"), "small", 1) == 0
    assert steps(tmp_path / "run") == [4, 3, 2, 1][:keep]
    check_whole(tmp_path / "run")


def test_the_last_whole_one_is_never_deleted(whole: Path, tmp_path: Path) -> None:
    copy = Store(Path(shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")))
    spoil(copy.path(4) / "shard_00000.safetensors")
    said: list[str] = []
    retire(copy, 1, said.append)
    assert copy.steps() == [4, 3, 2, 1] and len(said) == 1 and "expected xxh3" in said[0]
    assert said[0].endswith("older checkpoints are kept")
    retire(copy, 2, said.append)
    assert copy.steps() == [4, 3], "one of the kept is whole"
    spoil(copy.path(3) / "manifest.json")
    retire(copy, 1, said.append)
    assert copy.steps() == [4, 3]


def test_a_step_is_deleted_whole_or_not_at_all(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Store(Path(shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")))

    def killed(path: Path) -> None:
        (path / "shard_00000.safetensors").unlink()
        raise OSError(errno.EIO, "as if it had been killed there")

    monkeypatch.setattr(shutil, "rmtree", killed)
    said: list[str] = []
    retire(copy, 3, said.append)
    assert copy.steps() == [4, 3, 2] and said == [
        "old checkpoints could not be deleted: [Errno 5] as if it had been killed there"
    ]
    monkeypatch.undo()
    copy.reap()
    assert sorted(path.name for path in copy.folder.iterdir()) == ["step_00000002", "step_00000003", "step_00000004"]


def test_a_committed_step_is_never_overwritten(whole: Path, tmp_path: Path) -> None:
    copy = Store(Path(shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")), "word")
    before = {path.name: path.read_bytes() for path in copy.path(4).iterdir()}
    copy.staging(4).mkdir()
    (copy.staging(4) / "shard_00000.safetensors").write_bytes(b"other")
    with pytest.raises(OSError):
        copy.commit(4, read_manifest(copy.path(3)).to_bytes())
    assert {path.name: path.read_bytes() for path in copy.path(4).iterdir()} == before


def test_what_killed_jobs_have_left_is_removed_and_nothing_else(
    tiny_data: TinyData, whole: Path, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(whole, tmp_path / "run"))
    for name in (".step_00000009.abc.tmp", ".step_00000002.abc.old", ".step_x", "notes"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "file").touch()
    assert launch(tiny_data.load(run.path, *OPTIONS, "checkpoint.resume=auto"), "small", 1) == 0
    assert sorted(path.name for path in run.checkpoints.iterdir() if path.name[0] != "s") == [".step_x", "notes"]


def spoil(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("bad", "background"),
    [
        (0, "true"),
        (1, "false"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, "false"), (1, "true"))),
    ],
)
def test_the_rank_whose_disk_is_full_is_named(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, bad: int, background: str
) -> None:
    """The other rank's disk has room: both end, and neither says anything else."""
    honest, calls = shard.write_all, []
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")

    before = set(children.read_text().split())

    def full(*arguments):
        calls.append(arguments)
        ranks = sorted(int(pid) for pid in children.read_text().split() if pid not in before)
        if len(calls) > 1 and ranks.index(os.getpid()) == bad:
            raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))
        return honest(*arguments)

    monkeypatch.setattr(shard, "write_all", full)
    config = tiny_data.load(tmp_path / "run", *OPTIONS, "parallel.tensor=2", f"checkpoint.async={background}")
    assert launch(config, "small", 2) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"MZ-403 rank={bad} step=2 ") and "No space left on device" in err and err.count("\n") == 1
    assert steps(tmp_path / "run") == [1]
    check_whole(tmp_path / "run")
