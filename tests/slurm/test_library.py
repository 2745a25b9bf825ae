"""An example of the library under srun, on two nodes of real daemons."""

import subprocess
import sys

import pytest

from tests.slurm.cluster import obstacle
from tests.tiny_run import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(obstacle() is not None, reason=f"no SLURM here: {obstacle()}"),
]


def test_a_sharded_module_trains_under_srun_as_under_torchrun(slurm: dict[str, str]) -> None:
    options = ["examples/recommender.py", "--stage", "3", "--rows", "1000", "--steps", "20"]
    srun = ["srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", sys.executable, *options]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    said = []
    for line in (srun, torchrun):
        done = subprocess.run(line, cwd=ROOT, env=slurm, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append([row.split(": loss")[0] for row in done.stdout.splitlines()])  # weights are others in each run
    assert said[0] == said[1]
    assert said[0] == ["step 10", "step 20"], "one rank prints"
