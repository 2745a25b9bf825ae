"""Models that are larger than the memory they may use: on disks they train, with the bits of those that fit."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.observe.jsonl import read_rows
from tests.tiny_run import ROOT, TinyData, repeating

WIDE = ("model.layers=12", "model.hidden=896", "model.heads=8", "run.steps=2", "checkpoint.every=null")
NVME = ("zero.stage=3", "zero.offload.optimizer=nvme", "zero.offload.parameters=nvme", "zero.offload.host_mb=200")
PARAMETERS = 12 * 12 * 896**2  # and some; 16 bytes each of parameters, gradients and moments

# Runs the command line with at most so many bytes of data, and says how much it had resident at most.
LIMITED = """
import json, resource, runpy, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
sys.argv = sys.argv[2:]
code = 0
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code or 0
print(json.dumps({"code": code, "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))
"""


def limited(tiny_data: TinyData, folder: Path, most: int, *options: str) -> tuple[int, int]:
    """Return (exit code, most bytes resident) of a run that may have so many bytes of data."""
    line = [sys.executable, "-c", LIMITED, str(most), "train.py", "--config", str(tiny_data.config)]
    done = subprocess.run([*line, f"run.dir={folder}", *options], cwd=ROOT, capture_output=True, text=True)
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return 1, 0
    return told["code"], told["resident"]


def rows(folder: Path) -> list[dict]:
    kept = map(repeating, read_rows(folder / "metrics.jsonl"))
    return [{key: value for key, value in row.items() if key != "memory_peak_bytes"} for row in kept]


@pytest.mark.full
def test_states_of_four_times_the_memory(tiny_data: TinyData, tmp_path: Path) -> None:
    """What a tiny model takes anyway, and a quarter of the states: too little for a run in memory."""
    states, free = 16 * PARAMETERS, resource.RLIM_INFINITY
    code, base = limited(tiny_data, tmp_path / "tiny", free, "run.steps=2")
    assert code == 0
    most = 2 * base + states // 4  # data that is never touched counts too: as much again as is resident
    nvme = (*WIDE, *NVME, f"zero.offload.path={tmp_path / 'disk'}")
    code, resident = limited(tiny_data, tmp_path / "there", most, *nvme)
    assert code == 0
    assert resident <= base + states // 4
    assert limited(tiny_data, tmp_path / "refused", most, *WIDE, "zero.stage=3")[0] != 0
    code, whole = limited(tiny_data, tmp_path / "here", free, *WIDE, "zero.stage=3")
    assert code == 0 and whole > base + states // 2
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


@pytest.mark.full
def test_a_billion_parameters_are_born_trained_saved_and_resumed(tiny_data: TinyData, tmp_path: Path) -> None:
    """16 GB of states, 12 of them saved, under 4 GiB of resident memory."""
    run, disk = tmp_path / "run", f"zero.offload.path={tmp_path / 'disk'}"
    large = ("model.layers=20", "model.hidden=2048", "model.heads=16", "batch.global=1", "batch.micro=1")
    large += (*NVME[:3], disk, "zero.offload.host_mb=1024", "schedule.decay=constant", "checkpoint.every=3")
    for steps, options in ((3, ()), (4, ("checkpoint.resume=auto",))):
        code, resident = limited(
            tiny_data, run, resource.RLIM_INFINITY, *large, f"run.steps={steps}", "checkpoint.keep=1", *options
        )
        assert code == 0 and resident <= 4 << 30, (steps, code, resident)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4]
