"""A run that does not train changes nothing: not the folder of a run that is done; and a refused one leaves none."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.base.errors import UserError, is_refusal
from megazero.checkpoint.store import Store
from megazero.config.file import load, name_of
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from megazero.run.session import launch
from tests import warm
from tests.quiet import without_heartbeat
from tests.tiny_run import ROOT, TinyData, command

TWO = ("parallel.tensor=2",)


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Of every file and folder below one: when it was changed, and what is in it."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
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


def test_equal_steps_on_more_ranks_leave_no_logs(tiny_data: TinyData, done: Path) -> None:
    before = everything(done)
    line = ("train.py", "--config", tiny_data.config, f"run.dir={done}", "checkpoint.resume=auto", *TWO)
    again = command(*line)
    assert (again.returncode, again.stderr) == (0, "") and again.stdout.startswith("nothing to do: ")
    assert everything(done).keys() == before.keys()
    assert {name for name, was in everything(done).items() if was != before[name]} <= {"logs"}, "its time alone"


def test_fewer_steps_than_are_done_are_refused_as_that(tiny_data: TinyData, done: Path) -> None:
    """The log has the line; the right number of steps, or none, finds the run as it was."""
    before = everything(done)
    with pytest.raises(UserError, match=r"MZ-120 .*step 4 is saved, run.steps is 3: fewer than are done") as caught:
        launch(tiny_data.load(done, "run.steps=3", "checkpoint.resume=auto"), "small", 1)
    assert caught.value.exit_code == 2
    after = everything(done)
    changed = {name for name in before if before[name] != after[name]}
    assert after.keys() == before.keys() and changed == {"logs/rank_00.log"}
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
    assert "finished what an earlier job left" in capsys.readouterr().out
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


REFUSALS: dict[str, tuple[tuple[str, ...], int]] = {
    "no data": (("data.train=nowhere",), 201),
    "another tokenizer": (("model.vocab=300",), 112),
    "token out of range": (("data.tokenizer=null", "model.vocab=300", "data.valid=null"), 205),
    "nothing to go on from": (("checkpoint.resume=nowhere",), 402),
    "nothing to load": (("checkpoint.resume=auto", "checkpoint.load=weights"), 402),
    "fused kernels": (("precision.kernels=fused", "precision.dtype=fp64"), 114),
}


@pytest.mark.parametrize("ranks", [(), pytest.param(TWO, marks=pytest.mark.full)], ids=["one", "two"])
@pytest.mark.parametrize(
    "what", ["token out of range", *(pytest.param(w, marks=pytest.mark.full) for w in REFUSALS if "range" not in w)]
)
def test_a_refused_run_leaves_no_folder(tiny_data: TinyData, tmp_path: Path, what: str, ranks: tuple[str, ...]) -> None:
    """Nor the folders above it that were made for it."""
    overrides, code = REFUSALS[what]
    (tmp_path / "here").mkdir()
    folder = tmp_path / "here/new/runs/mine"
    done = command("train.py", "--config", tiny_data.config, f"run.dir={folder}", *overrides, *ranks)
    assert done.returncode == (2 if code < 200 else 1) and f"MZ-{code}" in done.stderr and done.stderr.count("\n") == 1
    assert list((tmp_path / "here").iterdir()) == []


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


def test_what_others_put_into_a_refused_run_s_folder_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "above/run")
    made = folder.missing()
    assert made == [tmp_path / "above/run", tmp_path / "above"]
    for path in (folder.log(0).parent, folder.checkpoints / "step_00000001"):
        path.mkdir(parents=True)
    folder.log(0).write_text("a line")
    folder.remove(made)
    assert folder.log(0).exists(), "a step is there: it has trained"
    (folder.checkpoints / "step_00000001").rmdir()
    folder.remove([])
    assert folder.log(0).exists(), "not made by the job"
    (folder.path / "notes.txt").write_text("mine")
    folder.remove(made)
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("code", "before", "within"),
    [(112, True, True), (205, True, True), (403, True, False), (330, True, False), (310, False, False)],
)
def test_failures_of_training_keep_their_logs(code: int, before: bool, within: bool) -> None:
    """Before the first step, and within it; later everything is kept."""
    assert [is_refusal(code, step) for step in (0, 1, 2)] == [before, within, False]


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
