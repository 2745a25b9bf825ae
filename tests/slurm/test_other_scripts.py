"""scripts/slurm/preflight.sbatch, array.sbatch and torchrun.sbatch, and the settings of a site, on real daemons."""

import json
import os
from pathlib import Path

import pytest

from megazero.config.file import load
from megazero.observe.jsonl import read_rows
from tests.slurm.cluster import obstacle
from tests.slurm.conftest import Job
from tests.tiny_run import TinyData

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(obstacle() is not None, reason=f"no SLURM here: {obstacle()}"),
]
# A site whose tasks are started through a command; on node2 that command shows an old package.
SITE = """
module() { echo "module $*"; }
module load gcc
export OF_THE_SITE=1
container=(bash "$PWD/container.sh")
"""
CONTAINER = """
[ "$OF_THE_SITE" = 1 ] || exit 9
[ "$SLURMD_NODENAME" = node2 ] && export PYTHONPATH=$PWD/old
exec "$@"
"""


def test_preflight_names_the_node_that_lacks_something(slurm, checkout: Path, tmp_path: Path) -> None:
    (checkout / "scripts/slurm/site.sh").write_text(SITE)
    (checkout / "container.sh").write_text(CONTAINER)
    old = checkout / "old/pydantic-1.0.dist-info/METADATA"
    old.parent.mkdir(parents=True)
    old.write_text("Metadata-Version: 2.1\nName: pydantic\nVersion: 1.0\n")
    line = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1", "scripts/slurm/preflight.sbatch", tmp_path]
    job = Job(slurm, tmp_path / "preflight.out", line, checkout)
    job.until(job.ended)
    lines = job.text().splitlines()
    assert job.state() == "FAILED" and job.shown("ExitCode") == "1:0", job.text()
    assert lines[0] == "module load gcc"
    assert [line[:11] for line in lines if line.startswith("node1: ")] == ["node1: ok: "]
    assert any(line.startswith("node2: missing: pydantic (1.0, expected pydantic>=2.10)") for line in lines), job.text()
    assert f"1 of 2 nodes can train; what each said is in preflight-{job.number}" in lines
    found = json.loads((checkout / f"preflight-{job.number}/node2.json").read_text())
    assert found["missing"] == ["pydantic"]
    right = json.loads((checkout / f"preflight-{job.number}/node1.json").read_text())
    texts = {finding["name"]: finding["text"] for finding in right["parts"]["devices"]}
    assert f"({os.cpu_count()} at once" in texts["matmul fp32"], "all cores of the node are measured"


def test_every_task_of_an_array_trains_in_a_folder_of_its_own(
    tiny_data: TinyData, slurm, checkout: Path, tmp_path: Path
) -> None:
    options = ("--array=0,4,6", "--gpus-per-node=0", "--cpus-per-task=1")
    line = [*options, "scripts/slurm/array.sbatch", tiny_data.config, "run.steps=3", "schedule.min_lr=1e-5"]
    job = Job(slurm, tmp_path / "task-%a.out", line, checkout)
    job.until(job.ended)
    said = {task: (tmp_path / f"task-{task}.out").read_text() for task in (0, 4, 6)}
    for task, rate, seed in ((0, "1e-4", 0), (4, "3e-4", 1)):
        folder = checkout / f"runs/sweep/lr-{rate}-seed-{seed}"
        config = load(str(folder / "config.yaml"))
        assert (config.optimizer.lr, config.run.seed) == (float(rate), seed), said[task]
        assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3]
        assert [path.read_text() for path in (folder / "logs").glob("slurm-*.out")] == [said[task]]
    assert "there are 3 x 2 pairs; submit with --array=0-5" in said[6]
    assert sorted(path.name for path in (checkout / "runs/sweep").iterdir()) == ["lr-1e-4-seed-0", "lr-3e-4-seed-1"]


def test_torchrun_on_each_node_is_stopped_put_back_and_goes_on(tiny_data: TinyData, slurm, tmp_path: Path) -> None:
    """The signal goes to the batch shell, as `--signal=B:USR1@120` sends it."""
    options = ("--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1")
    run = (f"run.dir={tmp_path / 'run'}", "run.steps=300", "data.valid=null", "zero.stage=2", "batch.micro=1")
    line = [*options, "scripts/slurm/torchrun.sbatch", tiny_data.config, *run]
    job = Job(slurm | {"RANKS_PER_NODE": "1"}, tmp_path / "job.out", line)
    job.until(job.says("step 5/"))
    job.call("scancel", "--batch", "--signal=USR1", job.number)
    job.until(job.says("restart 1"))
    assert f"job {job.number} saved and asks to be started again" in job.text(), job.text()
    job.until(job.ended)
    assert job.state() == "COMPLETED" and "going on from" in job.text(), job.text()
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == list(range(1, 301))
