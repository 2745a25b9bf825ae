"""Models that are larger than the memory they may use: on disks they train, with the bits of those that fit."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megazero.observe.jsonl import read_rows
from tests.tiny_run import ROOT, TinyData, repeating

# By ranks: blocks and hidden size. What is gathered is of a block, and resident in every rank that reads it: so of more
# ranks the model has more of them.
SIZES = {1: (12, 896), 4: (192, 576)}
SHORT = ("run.steps=2", "checkpoint.every=null")
NVME = ("zero.stage=3", "zero.offload.optimizer=nvme", "zero.offload.parameters=nvme", "zero.offload.host_mb=200")
STATES = 16  # bytes of parameters, gradients and moments of one parameter in fp32
LARGE = ("model.layers=20", "model.hidden=2048", "model.heads=16", "model.seq_len=32", "precision.dtype=bf16")
RESIDENT = 4 << 30  # bytes of a rank of the billion parameters that LARGE has

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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", SIZES)
def test_states_of_four_times_the_memory(ranks: int, tiny_data: TinyData, disk: Path) -> None:
    """What a tiny model takes anyway, and a quarter of a rank's states: too little for a run in memory."""
    layers, hidden = SIZES[ranks]
    states, free = STATES * layers * 12 * hidden**2 // ranks, resource.RLIM_INFINITY
    spread = (f"--nproc={ranks}", "batch.micro=1", "zero.stage=3")
    wide = (*spread, *SHORT, f"model.layers={layers}", f"model.hidden={hidden}", "model.heads=8")
    code, base = limited(tiny_data, disk / "tiny", free, *spread, *SHORT)
    assert code == 0
    most = 2 * base + states // 4  # data that is never touched counts too: as much again as is resident
    nvme = (*wide, *NVME, f"zero.offload.path={disk / 'state'}")
    code, resident = limited(tiny_data, disk / "there", most, *nvme)
    assert code == 0
    assert resident <= base + states // 4
    assert limited(tiny_data, disk / "refused", most, *wide)[0] != 0
    code, whole = limited(tiny_data, disk / "here", free, *wide)
    assert code == 0 and whole > base + states // 2
    assert rows(disk / "there") == rows(disk / "here")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_billion_parameters_in_four_gibibytes(tiny_data: TinyData, disk: Path) -> None:
    """Born, trained for three steps, saved, and gone on from; takes 45 GB of the disk while it runs."""
    options = (*LARGE, *NVME, f"zero.offload.path={disk / 'state'}", "batch.micro=1", "schedule.decay=constant")
    options += ("data.valid=null", "checkpoint.every=null", "checkpoint.keep=1")
    for steps, begins in ((3, "none"), (4, "auto")):
        began = time.monotonic()
        more = (f"run.steps={steps}", f"checkpoint.resume={begins}")
        code, resident = limited(tiny_data, disk / "run", resource.RLIM_INFINITY, *options, *more)
        print(f"to step {steps}: {time.monotonic() - began:.0f} s, {resident / 2**30:.2f} GiB resident at most")
        assert code == 0 and resident <= RESIDENT
        assert [row["step"] for row in rows(disk / "run")] == list(range(1, steps + 1))
