"""When a SLURM job is told to save: by plan's time of a save, by its own shell. SLURM's commands are stand-ins."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from megazero.__main__ import main as megazero
from scripts.slurm.lead import main
from tests.tiny_run import ROOT

# srun runs the command of its last task here; scontrol writes down what it is asked; a rank waits to be told to save.
SRUN = '#!/bin/bash\nwhile [ "$1" != PYTHON ]; do shift; done\nshift\nexec PYTHON "$@"\n'
SCONTROL = '#!/bin/bash\necho "$@" >> scontrol.txt\n'
RANK = """#!/bin/bash
case "$*" in
    *slurm.folder*) echo run ;;
    *slurm.lead*) echo "$*" > lead.txt; echo LEAD ;;
    *train.py*) echo "${PET_SHUTDOWN_TIMEOUT:-}" > timeout.txt
        trap 'touch told; exit 75' USR1
        for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; done ;;
esac
"""


def lead(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    assert main(words) == 0
    out, err = capsys.readouterr()
    return int(out), err


def test_the_lead_is_that_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert lead(capsys, "", "8", "llama8b") == (120, "")
    seconds, _ = lead(capsys, "h100-80gb", "8", "llama8b", "batch.global=64")
    assert (
        megazero(["plan", "--config", "llama8b", "--gpus", "8", "--hardware", "h100-80gb", "batch.global=64", "--json"])
        == 0
    )
    assert seconds == json.loads(capsys.readouterr().out)["checkpoint"]["lead_s"] > 120
    assert lead(capsys, "h100-80gb", "8", "tiny") == (120, "")
    seconds, err = lead(capsys, "no-such-card", "8", "tiny")
    assert seconds == 120 and err.startswith("warning: ") and "MZ-116" in err


@pytest.mark.parametrize(("needed", "told"), [(200, True), (120, False)])
def test_the_batch_shell_tells_its_ranks_in_time(tmp_path: Path, needed: int, told: bool) -> None:
    shutil.copytree(ROOT / "scripts/slurm", tmp_path / "scripts/slurm", ignore=shutil.ignore_patterns("site.sh"))
    python = tmp_path / "python"
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", RANK)):
        (tmp_path / name).write_text(text.replace("PYTHON", str(python)).replace("LEAD", str(needed)))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts/slurm/site.sh").write_text(f"python={python}\nhardware=h200\n")
    slurm = {"SUBMIT_DIR": str(tmp_path), "JOB_ID": "7", "NTASKS": "2", "JOB_NODELIST": "node1", "JOB_NUM_NODES": "2"}
    slurm |= {"JOB_END_TIME": str(int(time.time()) + needed + 2)}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "node1", "PET_NPROC_PER_NODE": "4"}
    environment |= {f"SLURM_{name}": value for name, value in slurm.items()} | {"MEGAZERO_TORCHRUN": "1"}
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        line = ["bash", ROOT / "scripts/slurm/train.sbatch", "tiny", "run.steps=5"]
        done = subprocess.run(line, env=environment, stdout=out, stderr=err, cwd=tmp_path)
    said = (tmp_path / "out").read_text()
    assert (tmp_path / "lead.txt").read_text() == "-m scripts.slurm.lead h200 8 tiny run.steps=5\n"
    assert (tmp_path / "timeout.txt").read_text() == f"{needed - 20}\n"
    assert done.returncode == (75 if told else 0) and (tmp_path / "told").exists() == told, (
        tmp_path / "err"
    ).read_text()
    assert ("saves 200 s before its end" in said) == told
    assert not told or "requeue 7" in (tmp_path / "scontrol.txt").read_text()


def test_the_scripts_are_bash() -> None:
    for path in (ROOT / "scripts/slurm").glob("*.s*"):
        assert subprocess.run(["bash", "-n", path]).returncode == 0, path
