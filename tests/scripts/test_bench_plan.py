"""`doctor --write`, `plan` and real steps agree in 22 layouts: the one check from end to end that needs no GPU."""

import os
from dataclasses import replace

import pytest

from megazero.plan.machines import MACHINES
from scripts.bench import plan

MEMORY, TIME = 0.03, 0.15  # by which a plan may be off
QUIET = 0.05  # of the processors' time, taken by others


def test_layouts_are_planned_as_they_are_trained():
    names = [layout.name for layout in plan.LAYOUTS]
    assert len(set(names)) == len(names) >= 20
    assert all(layout.job().ranks == layout.ranks for layout in plan.LAYOUTS)


def test_of_two_measurements_the_faster_figures_count():
    fast = MACHINES["a100-80gb"]
    link = replace(fast.in_node, latency=1.0)
    slow = replace(fast, peak_flops={"fp32": 1e12}, memory_bandwidth=1.0, launch=1.0, in_node=link)
    one, other = replace(fast, peak_flops={"fp32": 2e12}), replace(slow, host_link_bandwidth=1e15)
    found = plan.faster(one, other)
    assert found == replace(one, host_link_bandwidth=1e15) and plan.faster(other, one).launch == one.launch


@pytest.mark.full
def test_a_layout_trains_and_tells_who_else_worked(forked: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "BASE", ("layers=1", "hidden=32", "heads=2", "vocab=64", "seq_len=16", "dropout=0.0"))
    seconds, size, foreign = plan.train(plan.LAYOUTS[0], steps=2, least=0.0)
    assert seconds > 0 and size > 10_000 and 0 <= foreign <= 1


@pytest.mark.full
@pytest.mark.parametrize("layout", plan.LAYOUTS, ids=lambda layout: layout.name)
def test_planned_bytes_are_held(layout: plan.Layout):
    _, held, _ = plan.train(layout, steps=1, least=0.0)
    assert layout.planned_bytes() == pytest.approx(held, rel=MEMORY)


@pytest.mark.full
@pytest.mark.timeout(1800)  # each layout trains twice for seconds
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="seconds say nothing beside the tests of other workers")
def test_plans_agree_with_real_steps():
    """Seconds only where nothing else worked: `pytest tests/scripts/test_bench_plan.py` on a quiet machine."""
    found = plan.compare(plan.LAYOUTS, plan.STEPS)
    far = {one.name: f"{one.of_bytes:.3f}" for one in found if abs(one.of_bytes - 1) > MEMORY}
    assert not far, f"planned bytes of those held: {far}"
    if (foreign := max(one.foreign for one in found)) > QUIET:
        pytest.skip(f"memory agrees; seconds say nothing: others took up to {foreign:.0%} of the processors")
    far = {one.name: f"{one.of_time:.2f}" for one in found if abs(one.of_time - 1) > TIME}
    assert not far, f"planned seconds of those taken: {far}"
