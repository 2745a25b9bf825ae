"""What a rank sends in a step, as the ledger of a real run counts it, against the closed form: to the byte."""

from dataclasses import replace

import pytest
import torch

from megazero.comm.grid import Grid
from megazero.plan.job import Bytes, Job
from megazero.plan.layers import parameters
from megazero.plan.links import ranks_in_node, split_by_node
from megazero.plan.model import Shape
from megazero.plan.share import share_of
from megazero.plan.traffic import flows, traffic
from megazero.zero.placement import Precision
from tests.layouts import RECOMPUTED, SHAPES, Rank, ids, job_on, pairwise, planned
from tests.ranks import run_ranks

DTYPES = {
    "fp32": Precision(),
    "fp64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "bf16-param": Precision(torch.bfloat16, torch.bfloat16),
}
SCHEDULES = {"none": (1, "1f1b", 1), "gpipe": (2, "gpipe", 1), "1f1b": (2, "1f1b", 1)}
SCHEDULES |= {"interleaved": (2, "interleaved", 2), "zb-h1": (2, "zb-h1", 1), "zb-v": (2, "zb-v", 2)}
MODES = {"none": {}, **RECOMPUTED}
WHAT = {"here": {}, "optimizer": {"offload_optimizer": "cpu"}, "parameters": {"offload_parameters": "cpu"}}
WHAT |= {"both": {"offload_optimizer": "cpu", "offload_parameters": "cpu"}}
FLAVOURS = ("deep", "deep-untied")
CASES = [
    (flavour, dtype, tensor, sequence, pipeline, data, stage, accumulation, mode, what)
    for flavour in FLAVOURS
    for dtype in DTYPES
    for tensor, sequence in ((1, False), (2, False), (2, True))
    for pipeline in SCHEDULES
    for data in (1, 2, 4)
    if tensor * data * SCHEDULES[pipeline][0] <= 8
    for stage in ((0, 1, 2, 3) if data > 1 else (1, 3))
    for accumulation in (1, 2, 4)
    for mode in MODES
    for what in WHAT
    if stage == 3 or what == "here" or (what == "optimizer" and stage > 0)
]


def ranks_of(case: tuple) -> int:
    return case[2] * case[5] * SCHEDULES[case[4]][0]


MOST = pairwise([case for case in CASES[::7] if ranks_of(case) <= 4])  # those that cover most come first
COVER = [case for case in MOST if ranks_of(case) <= 2][:5] + [case for case in MOST if ranks_of(case) == 4][:3]
REST = [case for case in (*MOST, *CASES[::499]) if case not in COVER]


def one_step(grid: Grid, layout: Job, shape: Shape, precision: Precision) -> dict[str, dict[str, int]]:
    """Bytes by axis and purpose."""
    rank = Rank(grid, layout, shape, precision)
    rank.step(0)
    told = grid.comm.ledger.traffic_as_dict()
    return {axis: {purpose: row["bytes_sent"] for purpose, row in rows.items()} for axis, rows in told.items()}


def check(
    flavour: str,
    dtype: str,
    tensor: int,
    sequence: bool,
    pipeline: str,
    data: int,
    stage: int,
    accumulation: int,
    mode: str,
    what: str,
) -> None:
    ranks, schedule, chunks = SCHEDULES[pipeline]
    layout = job_on(tensor, data, sequence, accumulation, stage, pipeline=ranks, schedule=schedule, chunks=chunks)
    layout = replace(layout, **MODES[mode], **WHAT[what])
    axes = {"tensor": tensor, "pipeline": ranks}
    ledgers = run_ranks(layout.ranks, one_step, layout, SHAPES[flavour], DTYPES[dtype], **axes)
    plan = planned(layout, SHAPES[flavour], DTYPES[dtype])
    for number, ledger in enumerate(ledgers):
        assert traffic(plan, number // (tensor * data), number // tensor % data, number % tensor) == ledger, (
            f"rank {number}"
        )


@pytest.mark.parametrize("case", COVER, ids=ids(COVER))
def test_the_ledger_of_a_step(case: tuple) -> None:
    check(*case)


@pytest.mark.parametrize(
    ("tensor", "kv_heads", "sequence", "mode"),
    [(2, 1, False, "none"), pytest.param(4, 2, True, "full", marks=pytest.mark.full), (4, 1, False, "selective")],
)
def test_the_ledger_of_ranks_that_share_heads(tensor: int, kv_heads: int, sequence: bool, mode: str) -> None:
    shape = replace(SHAPES["deep-untied"], kv_heads=kv_heads)
    layout = replace(job_on(tensor, 1, sequence, 2), **MODES[mode])
    plan = planned(layout, shape, DTYPES["fp32"])
    ledgers = run_ranks(tensor, one_step, layout, shape, DTYPES["fp32"], tensor=tensor)
    for rank, ledger in enumerate(ledgers):
        assert ledger["tensor"]["heads"] > 0 and traffic(plan, tensor_rank=rank) == ledger, f"rank {rank}"
    most = max(ledger["tensor"]["heads"] for ledger in ledgers)
    assert traffic(plan)["tensor"]["heads"] == most


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=ids(REST))
def test_the_ledger_of_a_step_anywhere(case: tuple) -> None:
    check(*case)


def tensor_axis(grid: Grid, layout: Job, shape: Shape, precision: Precision) -> dict[str, tuple[int, int]]:
    """Operations and bytes of a step on the tensor axis, by purpose."""
    Rank(grid, layout, shape, precision).step(0)
    rows = grid.comm.ledger.traffic_as_dict()["tensor"]
    return {purpose: (row["ops"], row["bytes_sent"]) for purpose, row in rows.items()}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_are_more_operations_and_no_more_bytes(sequence: bool, recompute: str) -> None:
    whole, layout = (job_on(2, 1, sequence, 2, 1, recompute=recompute, tensor_chunks=chunks) for chunks in (1, 3))
    shape, precision = SHAPES["deep"], DTYPES["fp32"]
    before, plan = (planned(job, shape, precision) for job in (whole, layout))
    assert traffic(before) == traffic(plan)
    of_layers = ("block", "head")
    expected = {
        flow.purpose: (flow.ops, flow.bytes)
        for flow in flows(share_of(plan, 0))
        if flow.purpose.startswith(of_layers) and flow.ops
    }
    for found in run_ranks(2, tensor_axis, layout, shape, precision, tensor=2):
        assert {purpose: row for purpose, row in found.items() if purpose.startswith(of_layers)} == expected


GPT3 = Shape(96, 12288, 96, 96, 4 * 12288, 51200, 2048)
MIXED = Bytes(2, 2, 4)


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_the_paper_s_2_2_3(stage: int, times: int) -> None:
    """Volume in units of 2 bytes a parameter x (N - 1) / N: the ZeRO paper, section 7. In stage 3 the tied weight is
    gathered at both ends of the forward and not for the backward."""
    ranks = 64
    found = traffic(Job(GPT3, MIXED, data=ranks, stage=stage, global_batch=ranks))["data"]
    unit = 2 * parameters(GPT3) * (ranks - 1) / ranks
    assert (found["gradients"] + found.get("parameters", 0)) / unit == pytest.approx(times, rel=0.005)


def test_the_paper_s_12_of_a_block_and_pa_s_1_12() -> None:
    """With the last sum of a replay, that is left out here, a block sums 12 b s h; Pa gathers 1: section 8."""
    t = 16
    found = traffic(Job(GPT3, MIXED, tensor=t, recompute="full", partition=True))["tensor"]
    unit = 2 * GPT3.seq_len * GPT3.hidden * GPT3.layers * (t - 1) / t
    assert (found["block forward"] + found["block backward"]) / unit == 10
    assert found["inputs"] / unit == 1
    assert found["inputs"] / (found["block forward"] + found["block backward"] + 2 * unit) == 1 / 12


def test_pipeline_messages_are_b_s_h_over_t_with_sequence_parallelism() -> None:
    """Narayanan et al. 2021, section 4.1: b s h, and b s h / t where what is sent is not sent t times."""
    layout = Job(GPT3, MIXED, tensor=8, pipeline=8, global_batch=64)
    bsh = 2 * GPT3.seq_len * GPT3.hidden * 64
    assert traffic(layout, 1)["pipeline"]["activations"] == bsh
    assert traffic(replace(layout, sequence=True), 1)["pipeline"]["gradients"] == bsh // 8


def test_nodes() -> None:
    """8 devices a node, tensor 4, data 4: rings over data cross, 2 of their ranks in each node; all is split once."""
    layout = Job(GPT3, MIXED, tensor=4, data=4, pipeline=2, global_batch=4)
    assert [ranks_in_node(layout, axis, 8) for axis in ("tensor", "data", "pipeline", "ends")] == [4, 2, 1, 1]
    found = traffic(layout)
    parts = split_by_node(layout, found, 8)
    for axis, purposes in found.items():
        assert sum(parts[axis].values()) == sum(purposes.values())
    assert parts["tensor"]["cross_node"] == 0 and parts["pipeline"]["in_node"] == 0
    assert parts["data"]["cross_node"] == sum(found["data"].values()) // 2
    assert split_by_node(layout, found, 32)["data"]["cross_node"] == 0
