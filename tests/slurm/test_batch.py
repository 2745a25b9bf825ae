"""scripts/slurm/train.sbatch on real daemons: told to stop it saves, goes back into the queue, and goes on."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megazero.checkpoint.store import Store
from megazero.observe.jsonl import read_rows
from tests.slurm.cluster import cluster, obstacle
from tests.tiny_run import ROOT, TinyData, command

pytestmark = [pytest.mark.full, pytest.mark.skipif(obstacle() is not None, reason=f"no SLURM here: {obstacle()}")]

OPTIONS = ("data.valid=null", "schedule.decay=constant", "model.dropout=0.1", "zero.stage=2", "batch.micro=1")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}  # nodes' names are no hosts'


class Job:
    """A job of two ranks on one node."""

    def __init__(self, environment: dict[str, str], config: Path, folder: Path, *overrides: str):
        self._environment, self.out = environment, folder / "job.out"
        options = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={self.out}")
        line = ["--parsable", *options, "scripts/slurm/train.sbatch", str(config), f"run.dir={folder / 'run'}"]
        self.number = self.call("sbatch", *line, *OPTIONS, *overrides).strip()

    def call(self, *line: str) -> str:
        done = subprocess.run(line, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not reached():
            text = self.out.read_text() if self.out.exists() else "no output"
            assert time.monotonic() < deadline, text
            time.sleep(0.1)

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: self.out.exists() and text in self.out.read_text()

    def ended(self) -> bool:
        return self.call("squeue", "-h", "-j", self.number, "-t", "PD,R,CG").strip() == ""

    def state(self) -> str:
        return self.call("scontrol", "-o", "show", "job", self.number).split("JobState=")[1].split()[0]


@pytest.mark.parametrize("batch", [False, True], ids=["ranks", "shell"])
def test_a_signal_puts_it_back_into_the_queue(tiny_data: TinyData, slurm, tmp_path: Path, batch: bool) -> None:
    steps = 400
    job = Job(slurm, tiny_data.config, tmp_path, f"run.steps={steps}")
    job.until(job.says("step 5/"))
    job.call("scancel", *["--batch"] * batch, "--signal=USR1", job.number)
    job.until(job.says("restart 1"))
    assert "stopped by SIGUSR1 after step" in job.out.read_text()
    assert f"job {job.number} saved and asks to be started again" in job.out.read_text()
    job.until(job.ended)
    assert job.state() == "COMPLETED" and "going on from" in job.out.read_text()
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == list(range(1, steps + 1))
    line = ("train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'whole'}", *OPTIONS, f"run.steps={steps}")
    assert command(*line, "--nproc", "2", OMP_NUM_THREADS="1").returncode == 0
    for path in Store(tmp_path / "whole/checkpoints").path(steps).glob("shard_*"):
        other = Store(tmp_path / "run/checkpoints").path(steps) / path.name
        assert path.read_bytes() == other.read_bytes(), "as if nothing had happened"


def test_cancelled_it_saves_and_is_gone(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    job = Job(slurm, tiny_data.config, tmp_path, "run.steps=1000000")
    job.until(job.says("step 5/"))
    job.call("scancel", job.number)
    job.until(job.ended)
    assert job.state() == "CANCELLED" and "stopped by SIGTERM" in job.out.read_text()
    assert len(Store(tmp_path / "run/checkpoints").steps()) == 1


def test_a_rank_that_dies_ends_the_job(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    job = Job(slurm, tiny_data.config, tmp_path, "run.steps=1000000", "parallel.timeout=5")
    job.until(job.says("step 5/"))
    ranks = subprocess.run(["pgrep", "-f", f"train.py.*{tmp_path}/run"], capture_output=True, text=True).stdout.split()
    os.kill(int(ranks[-1]), 9)
    job.until(job.ended)
    assert job.state() == "FAILED" and "MZ-31" in job.out.read_text()


def test_the_kill_switch_is_a_success(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    job = Job(slurm, tiny_data.config, tmp_path, "run.steps=1000000")
    job.until(job.says("step 5/"))
    (tmp_path / "run/STOP").touch()
    job.until(job.ended)
    assert job.state() == "COMPLETED" and "stopped by the file STOP" in job.out.read_text()
