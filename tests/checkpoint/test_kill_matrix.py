"""Ranks that are killed at named points of a run: whoever it is, the run goes on from its last checkpoint and ends as
if nothing had happened, bit for bit.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megazero.checkpoint import save, shard, snapshot
from megazero.checkpoint.save import Checkpoints
from megazero.checkpoint.store import Store
from megazero.data.loader import BatchLoader
from megazero.memory.activation_store import Arena
from megazero.nvme.disk import Disk
from megazero.observe.jsonl import JsonlSink, read_rows
from megazero.optim.mixture import Mixture
from megazero.pipeline.stage import Stage
from megazero.run.folder import RunFolder
from megazero.tools.training.launch import launch
from megazero.train.validation import Validation
from megazero.zero.engine import Engine
from megazero.zero.gather import Gather
from megazero.zero.reduce import Reduction
from tests.tiny_run import TinyData, repeating

STEPS = 6
OPTIONS = ("model.dropout=0.1", f"run.steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=1", "data.valid_every=3")
OPTIONS += ("data.valid_samples=4", "parallel.timeout=20", "model.layers=4", "batch.micro=1")

# What is called there, and the how many-th call in the run's life is the last. Only rank 0 commits and deletes.
POINTS: dict[str, tuple[Any, str, int]] = {
    "build": ("megazero.run.parts", "build_trainer", 1),
    "read a batch": (BatchLoader, "step", 4),
    "forward": (Stage, "forward", 15),
    "backward": (Stage, "backward", 9),
    "reduce gradients": (Reduction, "_start", 9),
    "norm and clip": ("megazero.zero.engine", "unit_squares", 4),
    "in the middle of an update": (Mixture, "update", 14),
    "gather parameters": (Gather, "publish", 14),
    "validate": (Validation, "score", 1),
    "begin to save": (Checkpoints, "save", 2),
    "copy": (snapshot, "copy_all", 2),
    "write a shard": (shard, "write_all", 3),
    "flush a shard": (shard, "flush", 2),
    "say what was written": (save, "announce_file", 2),
    "write the manifest": (Store, "commit", 2),
    "rename the folder": ("megazero.checkpoint.store", "flush_folder", 2),
    "delete an old step": (Store, "delete", 1),
    "write a row": (JsonlSink, "row", 3),
    "write the last row": (JsonlSink, "row", 6),
    "validate the last step": (Validation, "score", 2),
    "write the ledger before the last save": ("megazero.run.build", "write_ledger", 1),
    "write the ledger": ("megazero.run.session", "write_ledger", 1),
    "draw the loss": ("megazero.run.session", "draw_loss", 1),
    "read a manifest": ("megazero.checkpoint.choose", "read_manifest", 1),
    "load tensors": ("megazero.checkpoint.choose", "load_tensors", 1),
    "publish what was loaded": (Engine, "restore", 1),
}
FIRST_ONLY = ("write the manifest", "rename the folder", "delete an old step", "write a row", "write the last row")
FIRST_ONLY += ("draw the loss",)
IN_LOADING = ("read a manifest", "load tensors", "publish what was loaded")
ON_DISKS: dict[str, tuple[Any, str, int]] = {
    "reserve room": (Disk, "zeros", 3),
    "read a piece": (Disk, "_start_read", 30),
    "check a piece": (Disk, "_arrived", 31),
    "write a piece": (Disk, "_start_write", 40),
    "wait for writes": (Disk, "_drain", 9),
    "end an update": (Disk, "_take_back", 20),
}
ON_INPUTS: dict[str, tuple[Any, str, int]] = {
    "keep an input": (Arena, "put", 40),
    "bring an input back": (Arena, "fetch", 41),
}
POINTS |= ON_DISKS | ON_INPUTS
LAYOUTS = {
    "data": ("zero.stage=2",),
    "tensor": ("parallel.tensor=2", "parallel.sequence=true"),
    "pipeline": ("parallel.pipeline=2", "zero.stage=3"),
    "nvme": ("zero.stage=3", "zero.offload.optimizer=nvme", "zero.offload.parameters=nvme"),
}
LAYOUTS["inputs"] = ("parallel.tensor=2", "memory.recompute=full", "memory.partition=true", "memory.offload=nvme")
for name in ("nvme", "inputs"):
    LAYOUTS[name] += (f"zero.offload.path={tempfile.gettempdir()}", "zero.offload.host_mb=256")
DISKLESS = POINTS.keys() - ON_DISKS.keys() - ON_INPUTS.keys()
HAPPENS = dict.fromkeys(LAYOUTS, DISKLESS)
HAPPENS["nvme"] = DISKLESS - {"copy"} | ON_DISKS.keys()  # what is on disks is read when it is written
HAPPENS["inputs"] = ON_DISKS.keys() - {"end an update"} | ON_INPUTS.keys()  # the rest is as with "tensor"
CASES = [
    (layout, rank, point)
    for layout, points in HAPPENS.items()
    for point in POINTS
    if point in points
    for rank in ((0,) if point in FIRST_ONLY else (0, 1))
]
# In a step, in a commit, after the commit of the last step, in loading, and on disks.
COVER = [("data", 1, "backward"), ("data", 0, "rename the folder"), ("data", 0, "validate the last step")]
COVER += [("data", 1, "load tensors"), ("nvme", 1, "write a piece")]


def job(config: Any, point: str | None, rank: int) -> int:
    """Two ranks; one of them is killed at the point, after or before what is done there. The exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        if point is not None:
            _plant(point, rank)
        code = launch(config, "small", 2)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _plant(point: str, rank: int) -> None:
    place, name, last = POINTS[point]
    holder = sys.modules[place] if isinstance(place, str) else place
    honest: Callable[..., Any] = getattr(holder, name)
    counts = {"calls": 0, "parent": os.getpid()}

    def deadly(*arguments: Any, **options: Any) -> Any:
        counts["calls"] += 1
        if counts["calls"] >= last and _rank_of(counts["parent"]) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(*arguments, **options)

    setattr(holder, name, deadly)


def _rank_of(parent: int) -> int:
    """Ranks are forked in their order."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sorted(map(int, children)).index(os.getpid())


@dataclass(frozen=True)
class Left:
    """What a run leaves that must not depend on who was killed when."""

    shards: dict[str, bytes]
    rows: list[dict[str, Any]]


def left(folder: Path) -> Left:
    run = RunFolder(folder)
    step = Store(run.checkpoints).path(STEPS)
    rows = [repeating(row) for row in read_rows(run.metrics)]
    assert len(json.loads(run.ledger.read_text())) == 2
    assert run.loss_plot.stat().st_mtime_ns >= run.metrics.stat().st_mtime_ns
    return Left({path.name: path.read_bytes() for path in step.glob("shard_*")}, rows)


@pytest.fixture(scope="module")
def undisturbed(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, Left] = {}

    def of(layout: str) -> Left:
        if layout not in found:
            folder = tmp_path_factory.mktemp(layout) / "run"
            assert job(tiny_data.load(folder, *OPTIONS, *LAYOUTS[layout], "data.valid=0.1"), None, 0) == 0
            found[layout] = left(folder)
        return found[layout]

    return of


@pytest.mark.parametrize(
    ("layout", "rank", "point"),
    [pytest.param(*case, marks=() if case in COVER else pytest.mark.full) for case in CASES],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    tiny_data: TinyData, undisturbed, tmp_path: Path, layout: str, rank: int, point: str
) -> None:
    options = (*OPTIONS, *LAYOUTS[layout], "checkpoint.async=true", "data.valid=0.1")
    config = tiny_data.load(tmp_path / "run", *options)
    again = tiny_data.load(tmp_path / "run", *options, "checkpoint.resume=auto")
    if point in IN_LOADING:  # killed twice; the first time with something saved for sure
        assert job(tiny_data.load(tmp_path / "run", *options, "checkpoint.async=false"), "validate", rank) == 1
    assert job(again if point in IN_LOADING else config, point, rank) == 1, "it was killed"
    assert job(again, None, 0) == 0
    assert left(tmp_path / "run") == undisturbed(layout)
    assert not list((tmp_path / "run/checkpoints").glob(".step_*"))
