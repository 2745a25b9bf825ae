"""What differs from ours where a job is planned as another system trains it."""

from dataclasses import replace

import pytest

from megazero.plan.job import Bytes, Job
from megazero.plan.machines import MACHINES
from megazero.plan.memory import memory
from megazero.plan.model import Shape
from megazero.plan.systems import OURS, SYSTEMS
from megazero.plan.time import step_time
from megazero.plan.traffic import traffic

GPT3 = Shape(96, 12288, 96, 96, 4 * 12288, 51200, 2048)
WIDE = Job(GPT3, Bytes(2, 2, 4), tensor=8, pipeline=8, data=2, micro_batch=1, global_batch=64, recompute="full")
A100, H100 = MACHINES["a100-80gb"], MACHINES["h100-80gb"]


def test_ours_changes_nothing() -> None:
    assert OURS.on(A100) is A100 and OURS.memory(WIDE, 0) == memory(WIDE, 0)
    assert OURS.sent(WIDE, traffic(WIDE)) == traffic(WIDE)
    assert step_time(WIDE, A100) == step_time(WIDE, A100, OURS) and SYSTEMS["ours"] is OURS


def test_whole_blocks_are_summed_twelve_times() -> None:
    """Rajbhandari et al. 2019, section 8: 12 b s h a block where everything is replayed, here 10."""
    found, ours = SYSTEMS["megatron-2021"].sent(WIDE, traffic(WIDE)), traffic(WIDE)
    blocks = [sum(sent["tensor"][what] for what in ("block forward", "block backward")) for sent in (found, ours)]
    assert blocks[0] / blocks[1] == pytest.approx(12 / 10)
    split = replace(WIDE, sequence=True)
    replayed, sent = SYSTEMS["fsdp"].sent(split, traffic(split)), traffic(split)
    assert replayed["tensor"]["block forward"] * 7 == sent["tensor"]["block forward"] * 8
    assert replayed["pipeline"] == sent["pipeline"], "sequence parallelism has split it"
    assert found["pipeline"]["activations"] * 8 == ours["pipeline"]["activations"]
    assert found["data"] == ours["data"]


def test_stored_scores_and_the_allocator_are_held() -> None:
    """5 a s^2 b / t of one block that is replayed; the allocator's share of all tensors (Korthikanti et al. 2022)."""
    ours, found = memory(WIDE, 0), SYSTEMS["deepspeed"].memory(WIDE, 0)
    assert found.held["scores"] == 5 * 96 * 2048**2 // 8
    assert found.peak == pytest.approx((ours.peak + found.held["scores"]) * 1.25)
    kept = SYSTEMS["megatron-2021"].memory(replace(WIDE, recompute="none"), 0)
    assert kept.held["scores"] == 8 * 12 * found.held["scores"] and "allocator" not in kept.held
    assert SYSTEMS["fsdp"].memory(WIDE, 0) == ours


def test_sums_beside_products_are_waited_for_less() -> None:
    job = replace(WIDE, sequence=True, recompute="none")
    core = replace(SYSTEMS["megatron-core"], reached={})
    waits = {
        sums: step_time(job, H100, replace(core, sums=sums)).parts["tensor traffic"]
        for sums in ("none", "backward", "all")
    }
    assert 0 < waits["all"] < waits["backward"] < waits["none"]
    alone = replace(job, sequence=False)  # what is not split cannot be gathered beside a product
    assert step_time(alone, H100, core) == step_time(alone, H100, replace(core, sums="backward"))


def test_kernels_of_a_system_are_faster_only_where_it_was_measured() -> None:
    core = SYSTEMS["megatron-core"]
    assert core.on(H100).reached.matmul > H100.reached.matmul and core.on(MACHINES["h200"]).reached.attention == 0.40
    assert core.on(H100).reached.in_node == H100.reached.in_node and core.on(A100) is A100
    measured = replace(H100, reached=replace(H100.reached, fitted="from a file"))
    assert core.on(measured) is measured, "what a file says is not replaced"
