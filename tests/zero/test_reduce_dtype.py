"""Gradients summed over ranks in a dtype of their own (`zero.reduce_dtype`): accumulated in fp32, sent in bf16.

Against one process within a tolerance of its own; what is sent and held, to the byte; and where nothing is asked for,
the bits of before.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megazero.comm.grid import Grid
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.traffic import traffic
from megazero.tools.certify.tolerances import GRADIENT_FP32, LOSS_FP32, REDUCED, difference, weight_differences
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, Trained, equal, job_on, planned, train
from tests.ranks import run_ranks

FP32 = Precision()
NARROW = Precision(reduced=torch.bfloat16)
MIXED = Precision(torch.bfloat16, torch.float32)
LAYOUTS: dict[str, tuple[Job, str]] = {
    **{f"stage {stage}": (job_on(1, 2, False, 2, stage), "gpt") for stage in range(4)},
    "4 ranks, untied": (job_on(1, 4, False, 2, 2), "deep-untied"),
    "hybrid": (job_on(1, 4, False, 2, 3, shard_ranks=2), "deep"),
    "hybrid, one rank a group": (job_on(1, 2, False, 2, 1, shard_ranks=1), "gpt"),
    "offloaded": (replace(job_on(1, 2, False, 2, 2), offload_optimizer="cpu"), "gpt"),
    "hybrid, offloaded": (replace(job_on(1, 4, False, 2, 3, shard_ranks=2), offload_optimizer="cpu"), "gpt"),
    "tied ends": (job_on(1, 1, False, 2, 1, pipeline=2), "deep"),
    "tied ends, stage 2, split backward": (job_on(1, 2, False, 2, 2, pipeline=2, schedule="zb-h1"), "deep"),
    "tensor, sequence": (job_on(2, 2, True, 2, 1), "gpt"),
}
FEW = ("stage 0", "stage 2", "hybrid", "offloaded", "tied ends, stage 2, split backward")
CASES = [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in LAYOUTS]


@cache
def alone(flavour: str) -> Trained:
    return train(job_on(), flavour, FP32)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_within_its_tolerance(name: str) -> None:
    """The first step's loss knows of no gradient yet; its gradients are off by roundings of bf16, and not by none."""
    layout, flavour = LAYOUTS[name]
    found, expected, shape = train(layout, flavour, NARROW), alone(flavour), SHAPES[flavour]
    assert difference(found.losses[:1], expected.losses[:1]) <= LOSS_FP32
    assert difference(found.losses, expected.losses) <= LOSS_FP32 + REDUCED.loss
    assert difference(found.norms[:1], expected.norms[:1]) <= GRADIENT_FP32 + REDUCED.norm
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    apart = weight_differences(found.gradients, expected.gradients, **heads)
    assert max(apart.values()) <= GRADIENT_FP32 + REDUCED.gradients
    assert max(apart.values()) > 10 * GRADIENT_FP32, "nothing was rounded"


@pytest.mark.parametrize(("stages", "accumulation"), [((0, 1), 2), ((2, 3), 2), ((1, 2), 1)], ids=str)
def test_stages_give_the_same_bits(stages: tuple[int, int], accumulation: int) -> None:
    one, other = (train(job_on(1, 4, False, accumulation, stage), "gpt", NARROW) for stage in stages)
    equal(one, other)


@pytest.mark.parametrize("stage", [1, 3])
def test_offload_changes_no_bit(stage: int) -> None:
    layout = job_on(1, 2, False, 2, stage)
    equal(train(replace(layout, offload_optimizer="cpu"), "gpt", NARROW), train(layout, "gpt", NARROW))


@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "bf16"])
def test_the_dtype_of_the_accumulation_is_the_default(precision: Precision) -> None:
    """Asked for by name it is the same bit for bit, and nothing is staged."""
    layout = job_on(1, 2, False, 2, 2)
    named = replace(precision, reduced=torch.float32)
    equal(train(layout, "gpt", named), train(layout, "gpt", precision))
    held = [run_ranks(2, one_step, layout, "gpt", each)[0][1] for each in (named, precision)]
    assert held[0] == held[1]


def one_step(grid: Grid, layout: Job, flavour: str, precision: Precision) -> tuple[dict[str, dict[str, int]], int]:
    """The bytes sent by axis and purpose, and those of the pools."""
    rank = Rank(grid, layout, SHAPES[flavour], precision)
    rank.step(0)
    ledger = grid.comm.ledger
    sent = {
        axis: {purpose: row["bytes_sent"] for purpose, row in rows.items() if row["bytes_sent"]}
        for axis, rows in ledger.traffic_as_dict().items()
    }
    return {axis: purposes for axis, purposes in sent.items() if purposes}, ledger.bytes_as_dict().get(
        "pool", {"peak": 0}
    )["peak"]


SUMMED = {("data", "gradients"), ("shard", "gradients"), ("replica", "gradients"), ("ends", "tied")}


@pytest.mark.parametrize("name", CASES)
def test_what_is_summed_is_half_of_what_it_was(name: str) -> None:
    """To the byte; all else is as it was, and the plan knows both, and the memory of the pools."""
    layout, flavour = LAYOUTS[name]
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "shard": layout.shard_ranks}
    wide, narrow = (run_ranks(layout.ranks, one_step, layout, flavour, each, **axes) for each in (FP32, NARROW))
    halves = 0
    for (before, _), (after, _) in zip(wide, narrow, strict=True):
        for axis, purposes in before.items():
            for purpose, size in purposes.items():
                summed = (axis, purpose) in SUMMED
                assert after[axis][purpose] * (1 + summed) == size, f"{axis}: {purpose}"
                halves += summed
    assert halves
    plan = planned(layout, SHAPES[flavour], NARROW)
    across, shard = layout.tensor * layout.data, layout.shard
    for number, (sent, pooled) in enumerate(narrow):
        stage = number // across
        assert traffic(plan, stage, number % across // layout.tensor % shard) == sent, f"rank {number}"
        assert memory(plan, stage, fused=False).held.get("pool", 0) == pooled, f"rank {number}"
