"""The loss curve is a readable PNG for any rows, and appears whole or not at all."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.observe.plot import centred_mean, draw_loss


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


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300))
def test_mean_starts_and_ends_on_the_data_and_stays_inside(values):
    means = centred_mean(values)
    assert len(means) == len(values)
    assert (means[0], means[-1]) == pytest.approx((values[0], values[-1]), abs=1e-9)
    assert min(values) - 1e-9 <= min(means) <= max(means) <= max(values) + 1e-9


@given(st.integers(1, 300), st.floats(-2, 2))
def test_mean_of_a_straight_line_is_the_line(count, slope):
    line = [3.0 + slope * place for place in range(count)]
    assert centred_mean(line) == pytest.approx(line, abs=1e-9)


def test_few_rows_are_not_smoothed():
    assert centred_mean([3.0, 1.0, 2.5]) == [3.0, 1.0, 2.5]
