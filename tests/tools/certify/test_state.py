"""What ranks hold together and what they read: exact, or measured parameter by parameter."""

import math
from dataclasses import replace

import pytest
import torch

from megazero.tools.certify.comparison import Difference, not_held_once, stale_replica, wrong_sample
from megazero.tools.certify.rank import Results
from megazero.tools.certify.tolerances import size_difference, state_distances


def results(
    held: list[tuple[str, int, int]], data_rank: int = 0, samples: list[int] | None = None, **shapes: list[int]
) -> Results:
    return Results(
        [0.0], [0.0], {}, {}, held, shapes or {"w": [4, 3]}, data_rank, [[(i, str(i)) for i in samples or []]]
    )


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ([("w", 0, 5)], [("w", 5, 12)], None),
        ([("w", 5, 12)], [("w", 0, 5)], None),
        ([("w", 0, 5), ("w", 5, 12)], [], None),
        ([("w", 0, 5)], [("w", 6, 12)], "element 5 of w, which has 12 elements, is held by no rank"),
        ([("w", 0, 5)], [("w", 5, 11)], "element 11 of w, which has 12 elements, is held by no rank"),
        ([("w", 1, 5)], [("w", 5, 12)], "element 0 of w, which has 12 elements, is held by no rank"),
        ([], [], "element 0 of w, which has 12 elements, is held by no rank"),
        ([("w", 0, 5)], [("w", 4, 12)], "element 4 of w is held by rank 0 and by rank 1"),
        ([("w", 0, 12)], [("w", 0, 12)], "element 0 of w is held by rank 0 and by rank 1"),
        ([("w", 0, 12), ("w", 3, 4)], [], "element 3 of w is held by rank 0 and by rank 0"),
        ([("w", 0, 5)], [("w", 5, 13)], "element 12 of w, which has 12 elements, is held by rank 1"),
    ],
)
def test_every_element_is_held_once(first: list, second: list, line: str | None) -> None:
    assert not_held_once([results(first), results(second)]) == line


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("rows", [None, (1, 2)])
def test_every_rank_computes_with_what_would_be_saved(rows: tuple[int, int] | None, wrong: bool) -> None:
    """In its own dtype, its own rows of it."""
    weights = {"w": torch.linspace(0, 1, 12)}
    mine = weights["w"].view(4, 3)[slice(1, 3) if rows else slice(None)].bfloat16()
    mine[-1, -1] += 2**-7 * wrong  # a unit of its last place
    rank = replace(results([]), rows={"w": rows} if rows else {}, stored={"weight/0/w": mine})
    line = "after the last step: weight w of rank 0 differs from the one that would be saved"
    assert stale_replica([rank], weights) == (line if wrong else None)


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([(0, [0, 1]), (1, [2, 3])], None),
        ([(0, [1, 0]), (0, [0, 1]), (1, [3, 2]), (1, [2, 3])], None),
        ([(0, [0, 1]), (0, [0, 2]), (1, [2, 3])], "rank 1 has other samples than the first rank of the same data rank"),
        ([(0, [0, 1]), (1, [1, 2])], "samples [0, 1, 1, 2], expected [0, 1, 2, 3]"),
        ([(0, [0, 1]), (1, [2])], "samples [0, 1, 2], expected [0, 1, 2, 3]"),
    ],
)
def test_samples_are_those_of_one_process(ranks: list, line: str | None) -> None:
    found = wrong_sample([results([], rank, samples) for rank, samples in ranks], results([], 0, [0, 1, 2, 3]))
    assert found == (line and f"step 1: {line}")


def test_the_noise_of_key_rows_is_measured_on_the_scale_of_the_weight() -> None:
    """Two query heads, a key and a value of two channels: rows 4 and 5 are the key's."""
    whole = {"a.attention.qkv.weight": torch.ones(8 * 3), "a.attention.qkv.bias": torch.ones(8)}
    whole["a.attention.qkv.bias"][4:6] = 1e-9
    for row, expected in ((4, 1e-3 / math.sqrt(2)), (0, 1e-3 / math.sqrt(6)), (7, 1e-3 / math.sqrt(6))):
        other = {name: value.clone() for name, value in whole.items()}
        other["a.attention.qkv.bias"][row] += 1e-3
        found = state_distances(other, whole, heads=2, kv_heads=1)
        assert found["a.attention.qkv.weight"] == 0
        assert found["a.attention.qkv.bias"] == pytest.approx(expected, rel=1e-3)


def test_distances_and_sizes() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert state_distances({"w": a}, {"w": b}, heads=1, kv_heads=1) == {"w": 5 / 4}
    assert size_difference([a, a], [b, b]) == pytest.approx(1 / 4)
    nothing = torch.zeros(2)
    assert state_distances({"w": nothing}, {"w": nothing}, heads=1, kv_heads=1) == {"w": 0}
    assert state_distances({"w": a}, {"w": nothing}, heads=1, kv_heads=1) == {"w": math.inf}
    assert size_difference([a], [nothing]) == math.inf


@pytest.mark.parametrize(
    ("value", "tolerance", "times", "beyond"),
    [
        (math.nan, 1.0, math.inf, True),
        (1e-9, 0.0, math.inf, True),
        (0.0, 0.0, 0, False),
        (3.0, 2.0, 1.5, True),
        (1.0, math.inf, 0, False),
    ],
)
def test_what_is_not_a_number_is_beyond_every_tolerance(
    value: float, tolerance: float, times: float, beyond: bool
) -> None:
    found = Difference("loss", value, tolerance, "somewhere")
    assert (found.times, found.beyond) == (times, beyond)
