"""A run of two tasks of srun, without a parent of ours: who is killed is named; no board is on a disk."""

import os
import re
import signal
from pathlib import Path

from tests.launcher.test_rendezvous import STEP, free_port
from tests.processes import until, until_gone
from tests.tiny_run import TinyData
from tests.warm import Process


def test_a_task_that_is_killed_while_it_trains_is_named_once(tiny_data: TinyData, tmp_path: Path):
    run = tmp_path / "run"
    line = ["train.py", "--config", tiny_data.config, f"run.dir={run}", "run.steps=1000000", "parallel.timeout=20"]
    env = os.environ | STEP | {"MASTER_PORT": free_port()}
    places = [{"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)} for k in (0, 1)]
    tasks = [Process(line, env=env | place, stdin=True) for place in places]
    metrics = run / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    assert not (run / "logs/board").exists()
    os.kill(tasks[1].pid, signal.SIGKILL)
    _, err = tasks[0].communicate()
    tasks[1].communicate()
    lines = [text for text in err.splitlines() if "MZ-" in text]
    assert len(lines) == 1 and tasks[0].returncode == 1, err
    assert re.match(r"MZ-31[14] rank=[01] step=\d+: .* in \w+ #\d+ ", lines[0]), err
    until_gone([task.pid for task in tasks])
