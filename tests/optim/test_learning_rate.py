"""The schedule's equations: its ends exactly, its shape by monotonicity, its edge cases by construction."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.optim.learning_rate import Decay, LearningRate

DECAYS: tuple[Decay, ...] = ("cosine", "linear", "wsd", "wsd-sqrt", "constant")

schedules = st.builds(
    lambda peak, ratio, warmup, total, decay, cooldown: LearningRate(
        peak, peak * ratio, warmup, total, decay, min(cooldown, total)
    ),
    st.floats(1e-6, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 60),
    st.integers(1, 80),
    st.sampled_from(DECAYS),
    st.integers(0, 80),
)


def test_warmup_is_linear_and_ends_at_the_peak():
    rate = LearningRate(0.6, 0.0, warmup=3, total=10, decay="cosine")
    assert [rate.at(u) for u in range(3)] == [0.6 * (1 / 3), 0.6 * (2 / 3), 0.6]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 2), (5, 6), (5, 100), (0, 7)])
def test_decay_ends_exactly_at_the_minimum(decay: Decay, warmup: int, total: int):
    rate = LearningRate(3e-4, 3e-5, warmup, total, decay)
    assert rate.at(total - 1) == 3e-5
    assert rate.at(total) == rate.at(total + 1000) == 3e-5


def test_cosine_and_linear_halfway():
    # five updates after one of warm-up: the third of them is 3/5 of the way
    done = 3 / 5
    assert LearningRate(1.0, 0.1, 1, 6, "linear").at(3) == pytest.approx(0.1 + 0.9 * (1 - done), rel=1e-15)
    expected = 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
    assert LearningRate(1.0, 0.1, 1, 6, "cosine").at(3) == pytest.approx(expected, rel=1e-15)


def test_wsd_is_flat_then_falls_over_the_cooldown():
    rate = LearningRate(1.0, 0.0, warmup=2, total=10, decay="wsd", cooldown=4)
    assert [rate.at(u) for u in range(10)] == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]
    assert rate.at(10) == rate.at(99) == 0.0


def test_wsd_without_cooldown_stays_at_the_peak():
    rate = LearningRate(1.0, 0.1, warmup=0, total=3, decay="wsd", cooldown=0)
    assert [rate.at(u) for u in range(6)] == [1.0] * 6


def test_cooldown_that_reaches_into_the_warmup_starts_after_it():
    rate = LearningRate(1.0, 0.0, warmup=4, total=6, decay="wsd", cooldown=6)
    assert [rate.at(u) for u in range(6)] == [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]


def test_constant_keeps_the_peak():
    assert {LearningRate(0.2, 0.0, 0, 5, "constant").at(u) for u in range(9)} == {0.2}


@pytest.mark.parametrize("decay", DECAYS)
def test_warmup_longer_than_the_run_never_decays(decay: Decay):
    rate = LearningRate(1.0, 0.1, warmup=100, total=10, decay=decay, cooldown=2)
    assert [rate.at(u) for u in range(10)] == [(u + 1) / 100 for u in range(10)]
    assert rate.at(99) == rate.at(500) == 1.0


@given(schedules)
def test_rises_in_the_warmup_then_never_rises_again(rate: LearningRate):
    values = [rate.at(u) for u in range(rate.total + rate.warmup + 5)]
    turn = max(rate.warmup - 1, 0)
    slack = 1e-15  # the blend m + (P - m) x rounds once more than its ends
    assert all(a < b for a, b in pairwise(values[: turn + 1]))
    assert all(a >= b - slack for a, b in pairwise(values[turn:]))


@given(schedules, st.integers(0, 300))
def test_stays_between_zero_and_the_peak_and_above_the_minimum_after_warmup(rate: LearningRate, update: int):
    value = rate.at(update)
    assert 0.0 < value <= rate.peak or (value == 0.0 and rate.minimum == 0.0)
    if update >= rate.warmup:
        assert value >= rate.minimum


@given(schedules)
def test_reaches_its_final_value_and_keeps_it(rate: LearningRate):
    end = max(rate.total, rate.warmup)
    assert rate.at(end) == rate.at(end + 1) == rate.at(10 * end)
    decays = rate.decay in ("cosine", "linear") or (rate.decay.startswith("wsd") and rate.cooldown > 0)
    if rate.warmup < rate.total:
        assert rate.at(rate.total - 1) == (rate.minimum if decays else rate.peak)


def test_wsd_sqrt_falls_by_the_root():
    rate = LearningRate(1.0, 0.2, 0, 100, "wsd-sqrt", cooldown=16)
    assert rate.at(83) == 1.0
    assert [rate.at(83 + n) for n in (4, 9, 16)] == pytest.approx([0.6, 0.4, 0.2])


def test_piecewise_goes_through_its_points():
    rate = LearningRate(2.0, 0.0, 2, 100, "piecewise", points=((10, 1.0), (20, 0.5), (40, 0.5), (50, 0.0)))
    assert [rate.at(u) for u in (0, 1, 5, 10, 15, 20, 30, 45, 50, 99)] == [1, 2, 2, 2, 1.5, 1, 1, 0.5, 0, 0]
