"""Dynamic loss scaling: halved on overflow, doubled after many good steps; skipped steps move nothing but the data."""

from dataclasses import replace

import torch

from megazero.builders.assemble import StageInputs
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


def test_an_empty_step_neither_counts_as_good_nor_lowers_the_scale() -> None:
    scale = LossScale(torch.device("cpu"), dynamic=True)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(GOOD, GOOD)
    for _ in range(3):
        scale.update(GOOD, counts=BAD)
        assert scale.scale == INITIAL and scale.good == GROWTH_INTERVAL - 1
    scale.update(GOOD, GOOD)
    assert scale.scale == 2 * INITIAL and scale.good == 0


def empty_between(grid, layout: Job) -> tuple[list[bool], list[float], list[int]]:
    """fp16 with two good steps, one without a valid token between them; after each what the loss scale is."""
    rank = Rank(grid, layout, SHAPES["gpt"], Precision(torch.float16, torch.float32))
    scale, honest = rank.engine.loss_scale, rank.feed
    scale.good.fill_(GROWTH_INTERVAL - 2)
    skipped, scales, good = [], [], []
    for step in range(3):

        def feed(step: int, m: int) -> StageInputs:
            given = honest(step, m)
            return replace(given, valid_SB=given.valid_SB & (step != 1))

        rank.feed = feed
        skipped.append(bool(rank.step(step).skipped))
        scales.append(float(scale.scale))
        good.append(int(scale.good))
    return skipped, scales, good


def test_an_empty_step_of_a_run_leaves_the_scale_as_it_is() -> None:
    for found in run_ranks(2, empty_between, job_on(1, 2, stage=2)):
        skipped, scales, good = found
        assert skipped == [False, True, False]
        assert scales == [INITIAL, INITIAL, 2 * INITIAL] and good == [GROWTH_INTERVAL - 1, GROWTH_INTERVAL - 1, 0]


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
        steps.append(float(rank.engine.optimizer.pieces(rank.engine.units[0])[0].step))
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
