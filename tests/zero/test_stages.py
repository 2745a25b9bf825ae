"""What rests, what is sent, what is allocated, and when: the claims of docs/zero.md, measured."""

import ctypes
import gc
import resource
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from megazero.comm.grid import Grid
from megazero.observe.allocations import Allocations
from megazero.plan.job import Job
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, equal, job_on, train
from tests.ranks import end_kept_ranks, run_ranks
from tests.tiny_run import ROOT
from tests.zero.formula import BYTES, KINDS, RANKS, TABLES, agrees, per_parameter, table_1

FP32 = Precision()
MIXED = {
    "fp32": FP32,
    "bf16, gradients fp32": Precision(torch.bfloat16, torch.float32),
    "bf16, gradients bf16": Precision(torch.bfloat16, torch.bfloat16),
}


def rest(grid: Grid, stage: int, flavour: str, precision: Precision) -> tuple[dict[str, int], int]:
    """Bytes held, and the padded parameters of this rank's part of the model."""
    rank = Rank(grid, job_on(grid["tensor"].size, grid["data"].size, stage=stage), SHAPES[flavour], precision)
    held = grid.comm.ledger.bytes
    return {kind: held[kind].now for kind in KINDS}, sum(unit.numel for unit in rank.engine.units)


@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=() if n == 2 else pytest.mark.full) for n in RANKS])
def test_resting_bytes_are_the_formula(ranks: int, stage: int, precision: str) -> None:
    """To the byte; what padding adds is stated: at most 2 x 16 elements a unit and data rank."""
    shape = SHAPES["gpt"]
    true = sum(p.numel() for p in whole_parameters(shape))
    for held, padded in run_ranks(ranks, rest, stage, "gpt", MIXED[precision]):
        for kind, size in per_parameter(stage, ranks, precision).items():
            assert held[kind] == size * padded, kind
        assert 0 <= padded - true <= (shape.layers + 3) * 16 * (ranks + 1)


def test_the_formula_is_the_papers() -> None:
    cells = list(table_1())
    assert len(cells) == 54 and all(agrees(ours, printed) for *_, ours, printed in cells)


def test_tables_of_the_page() -> None:
    page = (ROOT / "docs/zero.md").read_text(encoding="utf-8")
    for table in TABLES:
        assert "\n".join(table()) in page, f"{table.__name__}: python -m tests.zero.formula prints it anew"


def whole_parameters(shape):
    from tests.model.small import make

    return list(make(shape, torch.float32).parameters())


TRAFFIC = list(product((1, 4), ("gpt", "llama")))  # micro-batches, flavour
FEW = [(4, "gpt")]


def all_sent(grid: Grid, accumulation: int, flavour: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    """In each stage what `sent` returns."""
    tensor, data = grid["tensor"].size, grid["data"].size
    return [sent(grid, job_on(tensor, data, tensor > 1, accumulation, stage), flavour) for stage in range(4)]


@cache
def ranks_that_sent(
    tensor: int, data: int, accumulation: int, flavour: str
) -> list[list[tuple[dict[str, int], dict[str, int]]]]:
    """The same ranks for all stages: what they send in a step does not depend on other steps."""
    return run_ranks(tensor * data, all_sent, accumulation, flavour, tensor=tensor)


def sent(grid: Grid, layout: Job, flavour: str) -> tuple[dict[str, int], dict[str, int]]:
    """Elements that this rank sends in one step, by purpose; and elements of each unit."""
    rank = Rank(grid, layout, SHAPES[flavour], FP32)
    traffic = grid.comm.ledger.traffic
    rank.step(0)
    before = {purpose: sent.elements for purpose, sent in traffic["data"].items()}
    rank.step(1)
    now = {purpose: sent.elements - before[purpose] for purpose, sent in traffic["data"].items()}
    return now, {unit.layout.name: unit.numel for unit in rank.engine.units}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("accumulation", "flavour"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.full) for case in TRAFFIC],
)
@pytest.mark.parametrize(
    ("tensor", "data"), [*(pytest.param(1, data, marks=pytest.mark.full) for data in (2, 4)), (2, 2)]
)
def test_traffic_is_the_formula(tensor: int, data: int, stage: int, accumulation: int, flavour: str) -> None:
    """(N - 1) / N times: reductions r P and gathers g P.

    r = 1 of stages 0 (an all-reduce: 2) and 1, the number of micro-batches m of stages 2 and 3. g = 0, 1, 1, and in
    stage 3 for each micro-batch 2 of every block; 1 of the head, which is kept between forward and backward; 1 of an
    embedding, whose backward needs no parameters; 2 of a tied weight, used at both ends of forward. Paper: 2, 2, 2, 3.
    """
    for found, units in (rank[stage] for rank in ranks_that_sent(tensor, data, accumulation, flavour)):
        whole = sum(units.values())
        reduced = {0: 2, 1: 1, 2: accumulation, 3: accumulation}[stage] * whole
        gathered = {0: 0, 1: whole, 2: whole}.get(stage, 0)
        if stage == 3:
            times = {"tied": 2, "embedding": 1, "head": 1}
            gathered = accumulation * sum(times.get(name, 2) * numel for name, numel in units.items())
        assert found["gradients"] == reduced * (data - 1) // data
        assert found.get("parameters", 0) == gathered * (data - 1) // data
        small = {"norm": len(units) * (stage > 0)}
        padded = {kind: 2 * (data - 1) * (-(-count // data)) for kind, count in small.items()}
        assert {kind: found.get(kind, 0) for kind in small} == padded
        assert {purpose for purpose, elements in found.items() if elements} <= {
            "gradients",
            "parameters",
            "norm",
        }


def gathered_at_once(grid: Grid) -> set[int]:
    """The numbers of units that are whole while a stage-3 rank yields its parameters."""
    engine = Rank(grid, job_on(1, grid["data"].size, stage=3), SHAPES["llama"], FP32).engine
    return {sum(unit.parameters.whole is not None for unit in engine.units) for _ in engine.named_parameters()}


def test_parameters_are_yielded_with_one_unit_gathered() -> None:
    assert run_ranks(2, gathered_at_once) == [{1}] * 2


def resident(kind: str) -> int:
    """Bytes of a kind of proc(5), after everything that can be given back has been."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


HALF_A_BILLION = replace(
    SHAPES["llama"], layers=10, hidden=2048, heads=16, kv_heads=16, ffn=8192, activation="gelu", vocab=8192
)


def born(grid: Grid) -> tuple[int, int, int, int]:
    """Parameters of the model; of this rank, bytes that it keeps, most bytes allocated on the way, resident bytes."""
    layout = job_on(1, grid["data"].size, stage=3)
    before = resident("VmRSS")
    with Allocations() as counted:
        rank = Rank(grid, layout, HALF_A_BILLION, FP32)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    ledger = grid.comm.ledger.bytes
    kept = sum(ledger[kind].now for kind in KINDS)
    return sum(unit.numel for unit in rank.engine.units), kept, counted.peak, growth


@pytest.mark.full
def test_half_a_billion_parameters_are_born_in_shards() -> None:
    """Beside what it keeps no rank ever has more than a block; in all, some 9 GB."""
    end_kept_ranks()  # the machine has tests of another worker too
    largest = 4 * 12 * HALF_A_BILLION.hidden**2
    for numel, kept, peak, growth in run_ranks(4, born, fresh=True):
        assert numel > 0.5e9 and kept == 16 * numel // 4
        assert peak <= kept + largest
        assert growth <= kept + largest


def many_steps(
    grid: Grid, stage: int, steps: int, memory_options: dict[str, Any]
) -> tuple[list[dict[str, int]], int, set[int], set[int]]:
    """Bytes held after step 3 and at the end, growth of resident bytes between, and the memory that zero/ uses."""
    layout = job_on(grid["tensor"].size, grid["data"].size, False, 2, stage, **memory_options)
    rank = Rank(grid, layout, replace(SHAPES["gpt"], hidden=96, ffn=384), FP32)
    ledger = grid.comm.ledger

    def memory() -> set[int]:
        pools = {pool for u in rank.engine.units for pool in (u.parameters._pool, u.gradients._pool)}
        free = [buffer for pool in pools for buffers in pool._free.values() for buffer in buffers]
        kept = [
            t
            for u in rank.engine.units
            for t in (
                u.resting.parameters.values,
                u.resting.gradients.values,
                u.masters,
                *rank.engine.optimizer.runs(u)[0].state.values(),
            )
        ]
        return {tensor.untyped_storage().data_ptr() for tensor in free + kept}

    held, resident_at, memory_at = [], [], []
    for step in range(steps):
        rank.step(step % 5)
        # Resident bytes from the middle on: the interpreter warms up too, and what it keeps for itself comes and goes.
        if step in (2, steps // 2) or step >= steps - 5:
            rank.engine.gather.unshard(rank.engine.units)
            rank.engine.gather.reshard(rank.engine.units)
            held.append({category: held.now for category, held in ledger.bytes.items()})
            resident_at.append(resident("RssAnon"))  # pages of files come and go where the machine is short of memory
            memory_at.append(memory())
    return [held[0], held[-1]], min(resident_at[2:]) - resident_at[1], memory_at[0], memory_at[-1]


PA = {"recompute": "full", "partition": True}
PA_CPU = PA | {"offload": "cpu"}
THERE = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}


EVERYTHING = PA_CPU | THERE


@pytest.mark.parametrize(
    ("stage", "tensor", "options", "steps"),
    [
        *(pytest.param(stage, 1, {}, 200, marks=pytest.mark.full) for stage in (0, 1, 3)),
        pytest.param(2, 1, {}, 200, marks=pytest.mark.full),
        pytest.param(1, 2, PA, 200, marks=pytest.mark.full),
        pytest.param(2, 2, PA_CPU, 200, marks=pytest.mark.full),
        pytest.param(3, 1, EVERYTHING, 200, marks=pytest.mark.full),
        (3, 1, EVERYTHING, 40),
    ],
    ids=["0", "1", "3", "2", "1-Pa", "2-Pa+cpu", "3-everything on the host", "3-everything on the host-40"],
)
def test_nothing_is_allocated_after_the_third_step(
    stage: int, tensor: int, options: dict[str, Any], steps: int
) -> None:
    """Neither held nor resident bytes change, so the gap between them does not: nothing is left between buffers."""
    for (third, last), growth, memory, memory_at_the_end in run_ranks(
        2, many_steps, stage, steps, options, tensor=tensor, fresh=True
    ):
        assert third == last
        assert memory == memory_at_the_end
        assert growth < 1 << 18, f"{growth} bytes in {steps // 2} steps"


@pytest.mark.parametrize("flavour", ["gpt", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_may_be_in_flight_together(stage: int, flavour: str) -> None:
    """Forward of all micro-batches before the first backward: the same bits."""
    layout = job_on(1, 2, False, 4, stage)
    equal(train(replace(layout, schedule="gpipe"), flavour, FP32), train(layout, flavour, FP32))
