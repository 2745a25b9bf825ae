"""scripts/slurm/train.sbatch on real daemons: told to stop it saves, goes back into the queue, and goes on."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.checkpoint.store import Store
from megazero.observe.jsonl import read_rows
from tests.slurm.cluster import obstacle
from tests.slurm.conftest import Job
from tests.tiny_run import ROOT, TinyData

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(obstacle() is not None, reason=f"no SLURM here: {obstacle()}"),
]

OPTIONS = ("data.valid=null", "schedule.decay=constant", "model.dropout=0.1", "zero.stage=2", "batch.micro=1")


class Training(Job):
    """A job of two ranks, or one on each node."""

    def __init__(self, environment: dict[str, str], config: Path, folder: Path, *overrides: str, nodes: int = 1):
        options = (f"--nodes={nodes}", f"--ntasks-per-node={2 // nodes or 1}", "--gpus-per-node=0", "--cpus-per-task=1")
        line = [*options, "scripts/slurm/train.sbatch", config, f"run.dir={folder / 'run'}", *OPTIONS, *overrides]
        super().__init__(environment, folder / "job.out", line)

    def ranks(self, folder: Path) -> dict[str, int]:
        """The process of the rank on each node."""
        found = {}
        for process in pgrep(f"train.py.*{folder}/run"):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
                values = dict(line.split("=", 1) for line in environment if "=" in line)
                if values.get("SLURM_JOB_ID") == self.number and "SLURM_STEP_ID" in values:
                    found[values["SLURMD_NODENAME"]] = process
        return found


def pgrep(pattern: str) -> list[int]:
    return [int(word) for word in subprocess.run(["pgrep", "-f", pattern], capture_output=True).stdout.split()]


@pytest.mark.parametrize("batch", [False, True], ids=["ranks", "shell"])
def test_a_signal_puts_it_back_into_the_queue(tiny_data: TinyData, slurm, tmp_path: Path, batch: bool) -> None:
    steps = 400
    job = Training(slurm, tiny_data.config, tmp_path, f"run.steps={steps}")
    job.until(job.says("step 5/"))
    job.call("scancel", *["--batch"] * batch, "--signal=USR1", job.number)
    job.until(job.says("restart 1"))
    assert "stopped by SIGUSR1 after step" in job.out.read_text()
    assert f"job {job.number} saved and asks to be started again" in job.out.read_text()
    job.until(job.ended)
    assert job.state() == "COMPLETED" and "going on from" in job.out.read_text()
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == list(range(1, steps + 1))
    options = [f"run.dir={tmp_path / 'whole'}", *OPTIONS, f"run.steps={steps}"]
    line = [sys.executable, "train.py", "--config", str(tiny_data.config), *options, "--nproc", "2"]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=600)  # with one thread, as all of tests
    for path in Store(tmp_path / "whole/checkpoints").path(steps).glob("shard_*"):
        other = Store(tmp_path / "run/checkpoints").path(steps) / path.name
        assert path.read_bytes() == other.read_bytes(), "as if nothing had happened"


def test_cancelled_it_saves_and_is_gone(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    job = Training(slurm, tiny_data.config, tmp_path, "run.steps=1000000")
    job.until(job.says("step 5/"))
    job.call("scancel", job.number)
    job.until(job.ended)
    assert job.state() == "CANCELLED" and "stopped by SIGTERM" in job.out.read_text()
    assert len(Store(tmp_path / "run/checkpoints").steps()) == 1


def test_a_rank_that_dies_puts_it_back_without_that_node(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    options = ("run.steps=1000000", "parallel.timeout=20", "checkpoint.every=3", "checkpoint.keep=2")
    job = Training(slurm, tiny_data.config, tmp_path, *options, nodes=2)
    job.until(job.says("step 5/"))
    lost = max(job.ranks(tmp_path))
    os.kill(job.ranks(tmp_path)[lost], signal.SIGKILL)
    job.until(job.says("going on from"))
    assert job.shown("ExcNodeList") == lost and job.shown("Restarts") == "1"
    assert lost not in job.ranks(tmp_path) and len(job.ranks(tmp_path)) == 2
    kept = tmp_path / f"run/logs/slurm-{job.number}.out"
    assert kept.samefile(job.out), "one file, before and after it was requeued"
    assert [path.name for path in kept.parent.glob("slurm-*.out")] == [kept.name]
    (failure,) = (tmp_path / "run/logs/slurm-failures").read_text().splitlines()
    assert f"job {job.number} restart 0 node {lost} MZ-31" in failure and failure.startswith("step_000")
    (tmp_path / "run/STOP").touch()
    job.until(job.ended)
    assert job.state() == "COMPLETED"


def test_it_is_not_put_back_for_ever(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    environment = slurm | {"MEGAZERO_REQUEUES": "1"}
    job = Training(environment, tiny_data.config, tmp_path, "run.steps=1000000", "parallel.timeout=20", nodes=2)
    for start in range(2):
        job.until(lambda start=start: job.text().count("step 5/") > start)
        os.kill(max(job.ranks(tmp_path).items())[1], signal.SIGKILL)
        job.until(job.says("restart 1") if start == 0 else job.ended)
    assert job.state() == "FAILED" and "has failed 2 times after the same checkpoint" in job.text()


def test_a_rank_that_dies_on_the_last_nodes_does_not_empty_the_partition(
    tiny_data: TinyData, slurm, tmp_path: Path
) -> None:
    options = ("run.steps=1000000", "parallel.timeout=20", "parallel.pipeline=2", "batch.global=4")
    job = Training(slurm, tiny_data.config, tmp_path, *options, nodes=4)
    job.until(job.says("step 5/"))
    os.kill(max(job.ranks(tmp_path).items())[1], signal.SIGKILL)
    job.until(job.says("restart 1"))
    assert "is not excluded: partition all has 3 other nodes" in job.text() and job.shown("ExcNodeList") == "(null)"
    job.call("scancel", job.number)
    job.until(job.ended)


def test_a_mistake_in_a_config_is_one_line_and_leaves_nothing(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    job = Training(slurm, tiny_data.config, tmp_path, "optimizer.lrr=1")
    job.until(job.ended)
    assert job.state() == "FAILED" and job.shown("ExitCode") == "2:0"
    assert job.text().count("MZ-104") == 1 and not (tmp_path / "run").exists()


def test_kernels_are_built_before_the_ranks_start(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir(mode=0o700)
    job = Training(slurm | {"XDG_CACHE_HOME": str(cache)}, tiny_data.config, tmp_path, "run.steps=2", nodes=2)
    job.until(job.ended)
    assert job.state() == "COMPLETED", job.text()
    assert job.text().index("cpu kernels: /") < job.text().index("parameters, 2 steps")
    assert len(list((cache / "megazero").glob("cpu-*.so"))) == 1


def test_the_kill_switch_is_a_success(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    job = Training(slurm, tiny_data.config, tmp_path, "run.steps=1000000")
    job.until(job.says("step 5/"))
    (tmp_path / "run/STOP").touch()
    job.until(job.ended)
    assert job.state() == "COMPLETED" and "stopped by the file STOP" in job.out.read_text()
