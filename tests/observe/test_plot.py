"""The loss curve is a readable PNG for any rows, and appears whole or not at all."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.observe.plot import LEAST, POINTS, draw_loss, trend


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


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(-2, 2))
def test_the_trend_of_a_straight_line_is_the_line(count, slope):
    """At the ends too."""
    steps = list(range(5, 5 * count + 1, 5))
    line = [3.0 + slope * step for step in steps]
    assert trend(steps, line)[0] == steps and trend(steps, line)[1] == pytest.approx(line, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("count", [60, 200])
def test_the_ends_do_not_follow_the_last_batch(count):
    """Noise around a level: one batch far off at either end moves the trend there by half of it at most."""
    noise = random.Random(0)
    level = [3.0 + noise.gauss(0, 0.01) for _ in range(count)]
    for off in (0, count - 1):
        losses = [*level]
        losses[off] += 1.0
        values = trend(list(range(count)), losses)[1]
        assert abs(values[off] - 3.0) < 0.5


def test_few_rows_are_not_smoothed():
    assert trend([1, 2, 3], [3.0, 1.0, 2.5]) == ([1, 2, 3], [3.0, 1.0, 2.5])
    assert len(trend(list(range(LEAST)), [1.0] * LEAST)[0]) == LEAST


def test_a_long_run_is_drawn_through_fewer_points():
    steps, values = trend(list(range(100_000)), [1.0] * 100_000)
    assert len(steps) == len(values) == POINTS and (steps[0], steps[-1]) == (0, 99_999)
