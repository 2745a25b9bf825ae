"""A corrupt copy of a value is found, with its rank and parameter, wherever several ranks hold the value."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.comm.grid import Grid
from megazero.plan.job import Job
from megazero.run.replicas import differences, digest
from megazero.zero.placement import Precision
from megazero.zero.unit import Unit
from tests.layouts import SHAPES, Rank, job_on
from tests.ranks import run_ranks
from tests.tiny_run import TinyData, command

Corrupt = Callable[[Any, Unit], Tensor]
VALUES: dict[str, Corrupt] = {
    "parameters": lambda engine, unit: unit.resting.parameters.values,
    "masters": lambda engine, unit: unit.masters,
    "reduced gradients": lambda engine, unit: unit.resting.reduced_gradients,
    "exp_avg_sq": lambda engine, unit: engine.optimizer.runs(unit)[-1].state["exp_avg_sq"],
}


def layout(data: int, stage: int, *, tensor: int = 1, **more: Any) -> Job:
    return replace(job_on(tensor, data, False, 1, stage), **more)


# where each kind of value has a replica: (layout, ranks, kinds that exist twice, the axis)
PLACES = {
    "stage 0": (layout(4, 0), set(VALUES), "data"),
    "stage 1": (layout(4, 1), {"parameters"}, "data"),
    "stage 2": (layout(4, 2), {"parameters"}, "data"),
    "stage 3": (layout(4, 3), set(), "data"),
    "hybrid": (layout(4, 3, shard_ranks=2), set(VALUES), "replica"),
}


def corrupted(grid: Grid, job: Job, kind: str | None, bit: bool) -> list[str]:
    rank = Rank(grid, job, SHAPES["deep-untied"], Precision(torch.bfloat16, torch.float32))
    rank.step(0)
    engine = rank.engine
    engine.gather.finish()
    assert differences(engine.units, engine.optimizer.runs) == []
    unit = engine.units[1]
    if kind is not None and grid["world"].rank == grid["world"].size - 1:
        values = VALUES[kind](engine, unit)
        if bit:
            words = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
            words[1] ^= 1
        else:
            values[1] += 0.5
    return differences(engine.units, engine.optimizer.runs)


CASES = [(place, kind, bit) for place in PLACES for kind in VALUES for bit in (False, True)]
QUICK = {("stage 0", "masters", True), ("stage 1", "parameters", True), ("hybrid", "exp_avg_sq", False)}
QUICK |= {("stage 3", "masters", False)}


@pytest.mark.parametrize(
    ("place", "kind", "bit"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.full) for c in CASES]
)
def test_a_corrupt_value_is_found_where_it_has_a_replica(place: str, kind: str, bit: bool) -> None:
    job, twice, axis = PLACES[place]
    results = run_ranks(job.data, corrupted, job, kind, bit, shard=job.shard_ranks)
    said = [line for found in results for line in found]
    if kind not in twice:
        assert not said
        return
    odd = job.data - 1
    for line in said:
        assert line.startswith(f"{kind} of blocks.0.") and f"of the {axis} axis" in line and str(odd) in line
    assert said and (place == "hybrid" or f"on rank {odd} differ from the other ranks" in said[0])


def test_tensor_ranks_hold_norms_twice() -> None:
    results = run_ranks(2, norm, layout(1, 1, tensor=2), tensor=2)
    assert [len(found) for found in results] == [1, 1]
    assert results[0][0] == "masters of blocks.0.attention_norm.weight differ on ranks 0, 1 of the tensor axis"


def norm(grid: Grid, job: Job) -> list[str]:
    rank = Rank(grid, job, SHAPES["deep-untied"], Precision(torch.bfloat16, torch.float32))
    rank.step(0)
    unit = rank.engine.units[1]
    interval = next(i for i in unit.layout.intervals if i.name.endswith("attention_norm.weight"))
    if grid["tensor"].rank:
        unit.masters[interval.start - unit.shard.start] *= 1.0 + 2.0**-20
    return differences(rank.engine.units, rank.engine.optimizer.runs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    x = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
    before, seen = int(digest(x)), set[int]()
    for at in (0, 7, 39):
        for bit in range(8 * dtype.itemsize - 1):
            words[at] ^= 1 << bit
            seen.add(int(digest(x)))
            words[at] ^= 1 << bit
    assert before not in seen


BROKEN = """
import sys
from megazero.optim.mixture import Mixture
honest, calls = Mixture.update, []
def update(self, unit, **how):
    honest(self, unit, **how)
    calls.append(unit)
    if len(calls) == 12 and unit.axes.shard.rank == 1:
        unit.resting.parameters.values[0] += 0.5
Mixture.update = update
from megazero.__main__ import main
sys.argv[0] = "train.py"
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_ends_and_saves_nothing(every: int, tiny_data: TinyData, tmp_path: Path) -> None:
    options = (f"run.dir={tmp_path}/run", f"observe.check_replicas={every}", "zero.stage=0", "run.steps=6")
    options += ("checkpoint.every=1",)
    done = command("-c", BROKEN, "--config", tiny_data.config, "--nproc", "2", *options)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "MZ-306" in line]
    assert "step=" in line and " differ on ranks 0, 1 of the data axis" in line


def test_values_on_disks_are_left_out() -> None:
    job = layout(4, 3, shard_ranks=2, offload_optimizer="nvme", offload_parameters="nvme")
    assert run_ranks(4, corrupted, job, None, False, shard=2) == [[]] * 4
