"""Dynamic loss scaling: halved on overflow, doubled after many good steps; skipped steps move nothing but the data."""

import torch

from megazero.optim.loss_scale import GROWTH_INTERVAL, INITIAL, SMALLEST, LossScale
from megazero.plan.job import Job
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, job_on
from tests.ranks import run_ranks

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def test_the_scale_falls_at_once_and_rises_slowly() -> None:
    scale = LossScale(torch.device("cpu"), dynamic=True)
    scale.update(BAD, GOOD)
    assert scale.scale == INITIAL / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD, GOOD)
    assert scale.scale == INITIAL / 2
    scale.update(GOOD, GOOD)
    assert scale.scale == INITIAL
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD, GOOD)
    scale.update(BAD, GOOD)  # the count begins anew
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD, GOOD)
    assert scale.scale == INITIAL / 2
    for _ in range(100):
        scale.update(BAD, GOOD)
    assert scale.scale == SMALLEST


def test_without_fp16_there_is_no_scale() -> None:
    scale = LossScale(torch.device("cpu"), dynamic=False)
    loss = torch.tensor(3.0)
    assert scale.scaled(loss) is loss
    scale.update(BAD, GOOD)
    assert scale.scale == 1.0


def overflow(grid, layout: Job) -> tuple[list[float], list[bool], list[float], bool]:
    """fp16 with a scale that is too large by some powers of two: it falls until a step succeeds."""
    rank = Rank(grid, layout, SHAPES["gpt"], Precision(torch.float16, torch.float32))
    rank.engine.loss_scale.scale.fill_(2.0**28)
    before = rank.weights()
    scales, skipped, steps, same = [], [], [], True
    for step in range(12):
        result = rank.step(step)
        scales.append(float(result.loss_scale))
        skipped.append(bool(result.skipped))
        steps.append(float(rank.engine.optimizer.steps(rank.engine.units[0])[0]))
        if all(skipped):
            same &= all(torch.equal(before[name], value) for name, value in rank.weights().items())
    return scales, skipped, steps, same


def test_overflowing_steps_are_skipped_on_all_ranks_until_the_scale_fits() -> None:
    for layout in (job_on(1, 2, stage=1), job_on(2, 2, True, stage=3)):
        results = run_ranks(layout.tensor * layout.data, overflow, layout, tensor=layout.tensor)
        scales, skipped, steps, same = results[0]
        assert all(result == results[0] for result in results)
        count = sum(skipped)
        assert 2 <= count <= 11 and skipped == [True] * count + [False] * (12 - count)
        assert scales == [2.0 ** (28 - min(step, count)) for step in range(12)]
        assert steps == [float(max(0, step + 1 - count)) for step in range(12)]
        assert same
