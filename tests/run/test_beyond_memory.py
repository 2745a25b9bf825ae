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

# Runs a command with at most so many bytes of data, and says how much its processes had resident at most.
LIMITED = """
import json, resource, subprocess, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
code = subprocess.call([sys.executable, *sys.argv[2:]], stdout=subprocess.DEVNULL)
resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
print(json.dumps({"code": code, "resident": resident}))
"""


def limited(tiny_data: TinyData, folder: Path, most: int, *options: str) -> tuple[int, int]:
    """Return (exit code, most bytes resident) of a run that may have so many bytes of data."""
    line = [sys.executable, "-c", LIMITED, str(most), "train.py", "--config", str(tiny_data.config)]
    done = subprocess.run([*line, f"run.dir={folder}", *options], cwd=ROOT, capture_output=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
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
