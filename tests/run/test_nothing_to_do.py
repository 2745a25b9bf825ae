"""A run that does not train changes nothing in the folder of a run that is done but its logs."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.checkpoint.store import Store
from megazero.config.file import load, name_of
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from megazero.tools.training.launch import launch
from tests import warm
from tests.quiet import without_heartbeat
from tests.tiny_run import ROOT, TinyData, command

TWO = ("parallel.tensor=2",)


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Of every file below a folder but logs: when it was changed, and what is in it."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "logs"
    }


@pytest.fixture
def done(finished: RunFolder, tmp_path: Path) -> Path:
    """A run of 4 steps that is done, with the times of its files."""
    return Path(shutil.copytree(finished.path, tmp_path / "run", copy_function=shutil.copy2))


def test_another_jobs_folder_that_comes_meanwhile_is_not_touched(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made between this job's look for a folder and its try to take the lock."""
    run, honest = tmp_path / "runs/run", RunFolder.create

    def create(folder: RunFolder, lock: RunLock, *, resume: bool) -> str | None:
        other = RunLock(folder.lock)
        honest(folder, other, resume=resume)
        folder.config.write_text("theirs")
        return honest(folder, lock, resume=resume)

    monkeypatch.setattr(RunFolder, "create", create)
    with pytest.raises(UserError, match="MZ-420"):
        launch(tiny_data.load(run), "small", 1)
    assert (run / "config.yaml").read_text() == "theirs" and (run / "lock").exists() and (run / "logs").is_dir()


def test_a_folder_that_holds_only_the_kill_switch_stays_free(tiny_data: TinyData, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/STOP").touch()
    assert launch(tiny_data.load(tmp_path / "run"), "small", 1) == 0
    (tmp_path / "run/STOP").unlink()
    assert launch(tiny_data.load(tmp_path / "run"), "small", 1) == 0


def test_equal_steps_change_nothing(tiny_data: TinyData, done: Path, capsys) -> None:
    before = everything(done)
    config = tiny_data.load(done, "checkpoint.resume=auto", "optimizer.lr=1e-3", "observe.wandb=project")
    assert launch(config, "small", 1) == 0
    assert capsys.readouterr().out == f"nothing to do: {done / 'checkpoints'} has step 4, run.steps is 4\n"
    assert everything(done) == before


@pytest.mark.full
def test_equal_steps_change_nothing_on_two_ranks(tiny_data: TinyData, tmp_path: Path) -> None:
    line = ("train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", "checkpoint.resume=auto", *TWO)
    assert command(*line).returncode == 0
    before = everything(tmp_path / "run")
    again = command(*line, "observe.profile=2", "observe.tensorboard=true")
    assert (again.returncode, again.stderr) == (0, "") and again.stdout.startswith("nothing to do: ")
    assert everything(tmp_path / "run") == before


def test_equal_steps_on_more_ranks_change_nothing(tiny_data: TinyData, done: Path) -> None:
    before = everything(done)
    line = ("train.py", "--config", tiny_data.config, f"run.dir={done}", "checkpoint.resume=auto", *TWO)
    again = command(*line)
    assert (again.returncode, again.stderr) == (0, "") and again.stdout.startswith("nothing to do: ")
    assert everything(done) == before


def test_fewer_steps_than_are_done_are_refused_as_that(tiny_data: TinyData, done: Path) -> None:
    """The log has the line; the right number of steps finds the run as it was."""
    before = everything(done)
    with pytest.raises(UserError, match=r"MZ-120 .*step 4 is saved, but run.steps is 3") as caught:
        launch(tiny_data.load(done, "run.steps=3", "checkpoint.resume=auto"), "small", 1)
    assert caught.value.exit_code == 2
    assert everything(done) == before and "MZ-120" in (done / "logs/rank_00.log").read_text()
    assert load(str(done / "config.yaml")).run.steps == 4
    whole = load(str(done / "config.yaml"), ["checkpoint.resume=auto", f"run.dir={done}", "run.steps=5"])
    assert launch(whole, "small", 1) == 0 and Store(done / "checkpoints").steps() == [5, 4]


def test_a_new_config_is_kept_once_it_trains(tiny_data: TinyData, done: Path) -> None:
    assert launch(tiny_data.load(done, "run.steps=5", "checkpoint.resume=auto"), "small", 1) == 0
    assert load(str(done / "config.yaml")).run.steps == 5
    assert (done / "loss.png").stat().st_mtime_ns >= (done / "metrics.jsonl").stat().st_mtime_ns


def test_what_a_killed_job_owes_is_written_with_the_run_s_own_config(tiny_data: TinyData, done: Path, capsys) -> None:
    rows = (done / "metrics.jsonl").read_text().splitlines(keepends=True)
    (done / "metrics.jsonl").write_text("".join(rows[:3]) + rows[3][:20])
    (done / "ledger.json").unlink()
    config = (done / "config.yaml").read_bytes()
    assert launch(tiny_data.load(done, "checkpoint.resume=auto", "optimizer.lr=1e-3"), "small", 1) == 0
    assert "validation loss " in capsys.readouterr().out
    assert (done / "config.yaml").read_bytes() == config and (done / "ledger.json").exists()
    assert len((done / "metrics.jsonl").read_text().splitlines()) == 4
    before = everything(done)
    assert launch(tiny_data.load(done, "checkpoint.resume=auto"), "small", 1) == 0
    assert everything(done) == before


def test_a_stop_file_changes_nothing(tiny_data: TinyData, done: Path, capsys) -> None:
    (done / "STOP").touch()
    before = everything(done)
    assert launch(tiny_data.load(done, "run.steps=9", "checkpoint.resume=auto"), "small", 1) == 0
    assert "nothing done" in capsys.readouterr().out and everything(done) == before


@pytest.mark.parametrize("ranks", [(), TWO], ids=["one", "two"])
def test_a_folder_that_was_there_keeps_what_it_held(
    tiny_data: TinyData, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    done = command("train.py", "--config", tiny_data.config, f"run.dir={folder}", "data.train=nowhere", *ranks)
    assert "MZ-201" in done.stderr and (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "metrics.jsonl").exists() and not (folder / "lock").exists()
    assert "MZ-201" in (folder / "logs/rank_00.log").read_text()


def named(folder: Path, write: Callable[[Path], object]) -> str:
    path = folder / "config.yaml"
    path.parent.mkdir(parents=True)
    write(path)
    return name_of(str(path))


def test_a_run_s_own_config_is_called_after_its_folder(finished: RunFolder, tmp_path: Path, monkeypatch) -> None:
    assert named(tmp_path / "runs/mine", lambda path: shutil.copy(finished.config, path)) == "mine"
    assert name_of("tiny") == name_of("tiny.yaml") == "tiny"
    monkeypatch.chdir(tmp_path / "runs/mine")
    assert name_of("config.yaml") == "mine"
    (tmp_path / "runs/mine/other.yaml").touch()
    assert name_of("other.yaml") == "other"


def test_by_default_it_goes_on_in_that_folder(tiny_data: TinyData, tmp_path: Path) -> None:
    """`run.dir` is null in a config.yaml that was trained without one; the folder is that of the name."""

    def train(*arguments: object) -> subprocess.CompletedProcess[str]:
        done = warm.run([ROOT / "train.py", *arguments, "data.valid=null"], cwd=tmp_path)
        done.stdout = without_heartbeat(done.stdout)
        return done

    shutil.copy(tiny_data.config, tmp_path / "mine.yaml")
    assert train("--config", "mine.yaml", "run.steps=1").returncode == 0
    config = tmp_path / "runs/mine/config.yaml"
    assert config.is_file()
    taken = train("--config", "runs/mine/config.yaml", "run.steps=2")
    assert taken.returncode == 2 and taken.stderr.startswith("MZ-110 runs/mine: ")
    on = train("--config", "runs/mine/config.yaml", "run.steps=2", "checkpoint.resume=auto")
    assert on.returncode == 0 and on.stdout.startswith("mine: ") and not (tmp_path / "runs/config").exists()
