"""Plans and real steps agree in 22 layouts on bytes. Of seconds the benchmark tells: a test is never timed."""

from dataclasses import replace

import pytest

from megazero.plan.machines import MACHINES
from scripts.bench import plan

MEMORY = 0.03  # by which a plan may be off


def test_layouts_are_planned_as_they_are_trained():
    names = [layout.name for layout in plan.LAYOUTS]
    assert len(set(names)) == len(names) >= 20
    assert all(layout.job().ranks == layout.ranks for layout in plan.LAYOUTS)


def test_of_two_measurements_the_faster_figures_count():
    fast = MACHINES["a100-80gb"]
    slow = replace(fast, peaks={"fp32": 1e12}, memory_bandwidth=1.0, launch=1.0, in_node_latency=1.0)
    one, other = replace(fast, peaks={"fp32": 2e12}), replace(slow, host_bandwidth=1e15)
    found = plan.faster(one, other)
    assert found == replace(one, host_bandwidth=1e15) and plan.faster(other, one).launch == one.launch


def test_a_layout_trains_and_tells_who_else_worked(forked: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "BASE", ("layers=1", "hidden=32", "heads=2", "vocab=64", "seq_len=16", "dropout=0.0"))
    seconds, size, foreign = plan.train(plan.LAYOUTS[0], steps=2, least=0.0)
    assert seconds > 0 and size > 10_000 and 0 <= foreign <= 1


@pytest.mark.full
@pytest.mark.parametrize("layout", plan.LAYOUTS, ids=lambda layout: layout.name)
def test_plans_agree_with_real_steps(layout: plan.Layout):
    _, held, _ = plan.train(layout, steps=1, least=0.0)
    assert layout.planned_bytes() == pytest.approx(held, rel=MEMORY)
