"""What happens to a run's folder, and to its data, while it trains: said as what it is, and the rest is not lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megazero.checkpoint.store import Store
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.observe.jsonl import read_rows
from tests.run.test_session import training
from tests.tiny_run import ROOT, TinyData, all_tokens
from tests.warm import Process

ENDLESS = ("run.steps=100000", "data.valid=null", "schedule.decay=constant", "checkpoint.every=25", "checkpoint.keep=1")


def after_step(process: Process | subprocess.Popen[str], step: int) -> None:
    """Returns once the run has shown a step."""
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(f"it ended before step {step}: {process.stderr.read()}")


def rest_of(process: Process | subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, what it said on stderr) of a run that ends by itself."""
    _, err = process.communicate(timeout=100)
    return process.returncode, err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_folder_that_is_moved_while_it_trains(tiny_data: TinyData, tmp_path: Path, ranks: int) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with training(tiny_data, run, *ENDLESS, f"parallel.tensor={ranks}") as process:
        after_step(process, 30)
        run.rename(elsewhere)
        code, err = rest_of(process)
    assert code == 1 and "another job" not in err, err
    assert "MZ-4" in err and "the run's folder was deleted or moved during training" in err, err
    assert not run.exists() and Store(elsewhere / "checkpoints").steps()  # nothing is made anew where it was


def test_checkpoints_that_vanish_are_made_anew(tiny_data: TinyData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(tiny_data, run, *ENDLESS, "checkpoint.every=100000") as process:
        after_step(process, 30)
        shutil.rmtree(run / "checkpoints")
        (run / "STOP").touch()
        code, err = rest_of(process)
    assert (code, err) == (0, "")
    assert Store(run / "checkpoints").steps() == [read_rows(run / "metrics.jsonl")[-1]["step"]]


def test_a_lock_that_is_removed_is_not_another_job(tiny_data: TinyData, tmp_path: Path) -> None:
    with training(tiny_data, tmp_path / "run", *ENDLESS) as process:
        after_step(process, 30)
        (tmp_path / "run/lock").unlink()
        code, err = rest_of(process)
    assert code == 1 and err.splitlines()[-1].startswith("MZ-421"), err
    assert "the lock was removed while this job trained" in err, err


@pytest.mark.full
def test_a_folder_that_is_made_read_only_while_it_trains(tiny_data: TinyData, tmp_path: Path) -> None:
    """Root may write anywhere, unless that right is taken from it."""
    run = tmp_path / "run"
    line = [sys.executable, "train.py", "--config", str(tiny_data.config), f"run.dir={run}", *ENDLESS]
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv to take a right from root with")
        line = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *line]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        after_step(process, 30)
        for folder in (run, run / "checkpoints"):
            folder.chmod(0o500)
        code, err = rest_of(process)
    finally:
        for folder in (run, run / "checkpoints"):
            folder.chmod(0o700)
        process.kill()
        process.communicate()
    assert code == 1 and "another job" not in err, err
    assert "MZ-403" in err and "Permission denied" in err, err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_token_files_that_are_truncated_while_training(tiny_data: TinyData, tmp_path: Path, ranks: int) -> None:
    with IndexedDatasetWriter(tmp_path / "set", np.uint16) as writer:
        writer.append(all_tokens(tiny_data.train))
        writer.end_document()
    options = (f"data.train={tmp_path / 'set'}", f"parallel.tensor={ranks}")
    with training(tiny_data, tmp_path / "run", *ENDLESS, *options) as process:
        after_step(process, 30)
        os.truncate(tmp_path / "set.bin", 100)
        code, err = rest_of(process)
    assert code == 1 and len(err.splitlines()) == 1, err
    assert "MZ-204" in err and "set.bin: was truncated after it was opened: it ends at byte 100" in err
