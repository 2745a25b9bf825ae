"""The loss curve is a readable PNG for any rows, and appears whole or not at all."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.observe.plot import LEAST, POINTS, draw_loss, means, trend


def rows(count: int, every: int):
    noise = random.Random(0)
    for step in range(10, 10 * count + 1, 10):
        loss = 3.2 + 5.8 * math.exp(-step / (2.5 * count)) + noise.gauss(0, 0.08)
        valid = {"valid_loss": loss + 0.05} if (step // 10) % every == 0 else {}
        yield {"step": step, "loss": loss, **valid}


@pytest.mark.parametrize(
    "given_rows",
    [[], [{"step": 1, "loss": None}], [{"step": 1, "loss": 4.0}], list(rows(40, 10))],
    ids=["none", "null", "one", "many"],
)
def test_draws_a_picture(given_rows, tmp_path):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")
    draw_loss(given_rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


@settings(deadline=None, max_examples=20)
@given(st.integers(LEAST, 3 * POINTS), st.floats(-2, 2))
def test_the_trend_of_a_straight_line_is_the_line(count, slope):
    """At the ends too, and whatever the number of rows in an interval."""
    steps, losses = trend(*means([(5 * step, 3.0 + slope * 5 * step) for step in range(count)]))
    assert losses == pytest.approx(3.0 + slope * steps, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("count", [60, 2000])
def test_the_ends_do_not_follow_the_last_batch(count):
    """Noise around a level: one batch far off at either end moves the trend there by its share of the window."""
    noise = random.Random(0)
    level = [3.0 + noise.gauss(0, 0.01) for _ in range(count)]
    for off in (0, count - 1):
        losses = [*level]
        losses[off] += 1.0
        values = trend(*means(list(enumerate(losses))))[1]
        assert abs(values[0 if off == 0 else -1] - 3.0) < 0.2


def test_points_are_means_of_their_intervals():
    steps, losses = means([(step, step % 2) for step in range(4 * POINTS)])
    assert (
        len(steps) == POINTS and losses.tolist() == [0.5] * POINTS and (steps[0], steps[-1]) == (1.5, 4 * POINTS - 2.5)
    )


def test_few_rows_have_no_trend():
    few = means([(step, 3.0) for step in range(LEAST - 1)])
    assert few[1].tolist() == [3.0] * (LEAST - 1) and trend(*few)[0].size == 0
