"""A run that is told to stop before its first step three times in a row is not started again; progress forgives."""

from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.run.early_stops import EarlyStops
from megazero.run.folder import RunFolder
from tests.tiny_run import TinyData, command

BY = "stopped by SIGTERM"


def test_three_in_a_row_are_too_many(tmp_path: Path):
    path = tmp_path / "early_stops"
    for _ in range(2):
        EarlyStops(path).refuse()
        EarlyStops(path).add(BY)
    with pytest.raises(
        UserError, match=r"MZ-422 .*/early_stops: stopped by SIGTERM before the first step, 3 times"
    ) as e:
        EarlyStops(path).add(BY)
    assert e.value.exit_code == 1 and "remove this file to try again" in str(e.value)
    with pytest.raises(UserError, match=r"MZ-422 .* stopped before its first step 3 times"):
        EarlyStops(path).refuse()
    path.unlink()
    EarlyStops(path).refuse()


def test_a_step_forgives(tmp_path: Path):
    stops = EarlyStops(tmp_path / "early_stops")
    for _ in range(50):
        stops.add(BY)
        stops.add(BY)
        stops.forget()
    stops.forget()
    stops.refuse()
    assert list(tmp_path.iterdir()) == []


START = """
import os, signal, sys
from megazero.run import parts
from megazero.__main__ import main

honest = parts.build_trainer

def signalled(run, *rest, **options):
    built, grid = honest(run, *rest, **options), run.grid
    if grid["world"].rank == grid["world"].size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return built

parts.build_trainer = signalled
sys.exit(main(sys.argv[1:]))
"""


IN_CREATE = """
import os, signal, sys
from megazero.__main__ import main
from megazero.run.folder import RunFolder

honest = RunFolder.create

def create(*arguments, **named):
    dead = honest(*arguments, **named)
    os.kill(os.getpid(), signal.SIGTERM)
    return dead

RunFolder.create = create
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_signalled_while_it_makes_its_folder(tiny_data: TinyData, tmp_path: Path):
    """It is counted there, and the next start does not find a run that has never begun."""
    line = ["--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", "run.steps=1", "data.valid=null"]
    done = command("-c", IN_CREATE, "train", *line)
    assert done.returncode == 75 and "stopped by SIGTERM before the first step" in done.stdout
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_file()] == ["early_stops"]
    assert command("train.py", *line).returncode == 0


@pytest.mark.parametrize("ranks", [pytest.param(1), pytest.param(2, marks=pytest.mark.full)])
def test_a_run_signalled_while_it_builds(tiny_data: TinyData, tmp_path: Path, ranks: int):
    """Whoever starts it again: every start is another process. It fails on all ranks, with one line."""
    folder = RunFolder(tmp_path / "run")
    line = ["--config", tiny_data.config, f"run.dir={folder.path}", "run.steps=4", "checkpoint.resume=auto"]
    line += ["data.valid=null", f"parallel.tensor={ranks}"]

    def signalled() -> tuple[int, str]:
        done = command("-c", START, "train", *line)
        return done.returncode, done.stderr

    stops = folder.early_stops
    assert signalled()[0] == 75
    assert (folder.path / "early_stops").read_text() == "stopped by SIGTERM before the first step\n"
    stops.add(BY)
    code, err = signalled()
    assert code == 1 and err.count("\n") == 1 and err.startswith("MZ-422"), err
    assert "early_stops: stopped by SIGTERM before the first step, 3 times in a row" in err
    again = command("train.py", *line)
    assert again.returncode == 1 and "MZ-422" in again.stderr and not list(folder.checkpoints.iterdir())
    stops.forget()
    stops.add(BY)
    went_on = command("train.py", *line)
    assert went_on.returncode == 0, went_on.stderr
    assert not (folder.path / "early_stops").exists(), "the first step forgives"
