"""`plan` and real steps agree in 22 layouts in bytes; docs/benchmarks.md has the seconds."""

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
