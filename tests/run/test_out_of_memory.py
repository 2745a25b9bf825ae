"""Under a limit that a model fits below only with Pa, it trains with Pa, and without it one line says so."""

import re
import sys
from pathlib import Path

import pytest
import torch

from megazero.base.errors import LINE_LIMIT, UserError
from megazero.builders.assemble import build
from megazero.comm.grid import single
from megazero.config.schema import Config
from megazero.kernels.operations import REFERENCE
from megazero.launcher.world import World
from megazero.run.out_of_memory import explain_out_of_memory
from megazero.tools.training.plans import planner
from tests.tiny_run import TinyData, command

# Much to keep and little to compute: 48 blocks' inputs of 1 MB, of which Pa keeps half.
WIDE = (
    "model.layers=48",
    "model.hidden=32",
    "model.heads=2",
    "model.ffn=16",
    "model.seq_len=64",
    "batch.global=128",
    "batch.micro=128",
)
WIDE += ("memory.recompute=full", "parallel.tensor=2", "data.valid=null", "run.steps=1", "model.dropout=0.0")
LIMITED = """
import ctypes, resource, sys, threading
from pathlib import Path
# What is freed goes back to the system at once: by itself glibc keeps some tens of MB, now more, now less.
for option, value in ((-3, 65536), (-1, 65536), (-8, 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
    ctypes.CDLL(None).mallopt(option, value)
limit, peaks, line = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
if limit:  # of private memory, per process; what a bare import of torch maps of libraries does not count
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import megazero.run.session
import megazero.tools.training.launch as start
from megazero.__main__ import main

def data() -> int:
    return next(int(row.split()[1]) for row in open("/proc/self/status") if row.startswith("VmData"))

def watched(*arguments):
    most, over = [0], threading.Event()
    def look():
        while not over.wait(0.001):
            most[0] = max(most[0], data())
    threading.Thread(target=look, daemon=True).start()
    code = run_training(*arguments)
    over.set()
    with peaks.open("a") as file:
        file.write(f"{most[0]}\\n")
    return code

run_training = start.run_training
if not limit:  # looking takes memory too: below the limit there may be none for it
    start.run_training = watched
megazero.run.session.draw_loss = lambda *files: None  # its library takes more than is to be told apart
sys.exit(main(line))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_model_that_fits_only_with_pa(tiny_data: TinyData, tmp_path: Path) -> None:
    def run(limit: int, name: str, *options: str):
        line = ("train", "--config", tiny_data.config, *WIDE, *options, f"run.dir={tmp_path / name}")
        return command("-c", LIMITED, str(limit), str(tmp_path / name) + ".peaks", *map(str, line))

    pa = "memory.partition=true"
    free = run(0, "free", pa)
    assert free.returncode == 0, free.stderr
    peak = max(map(int, (tmp_path / "free.peaks").read_text().split())) * 1024
    spared = 48 * 1_048_576 // 2 - 2 * 1_048_576  # half of the inputs; two whole ones are put together again
    limit = peak + spared // 4
    assert run(limit, "with", pa).returncode == 0
    without = run(limit, "without")
    assert without.returncode == 1
    lines = [row for row in without.stderr.splitlines() if not row.startswith("warning: ")]
    assert len(lines) == 1, without.stderr
    (line,) = lines
    assert len(line) <= LINE_LIMIT and re.match(r"MZ-330 rank=[01]( step=1)?: out of memory", line), line
    assert "inputs 50.3" in line and "memory.partition=true saves 23.1 MB" in line


def config_of(**memory: str) -> Config:
    from megazero.config.schema import resolved

    model = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq_len": 16}
    return resolved(Config.model_validate({"model": model, "batch": {"global": 4, "micro": 2}, "memory": memory}))


SAID = [
    (MemoryError(), "out of memory; in use: "),
    (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 33554432 bytes."),
        " 33.6 MB more",
    ),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), " 2,147.5 MB more"),
    (OSError(12, "Cannot allocate memory"), "out of memory; in use: "),
]


@pytest.mark.parametrize(("error", "said"), SAID, ids=["python", "cpu", "cuda", "system"])
def test_what_the_libraries_say(error: Exception, said: str) -> None:
    grid, config, world = single(), config_of(), World(0, 1, 0)
    build(config, grid, torch.device("cpu"), REFERENCE)
    savings = planner(world)(config, 0, True).savings
    with pytest.raises(UserError, match="MZ-330") as caught, explain_out_of_memory(grid, savings):
        raise error
    line = str(caught.value)
    assert said in line and "memory.recompute=full saves" in line and "parameters 0.2" in line


def test_other_errors_are_left_alone() -> None:
    for error in (RuntimeError("shape mismatch"), OSError(2, "No such file"), ValueError("out of memory")):
        with pytest.raises(type(error)), explain_out_of_memory(single(), dict):
            raise error
