"""Every grid computes the model that one process does: tensor, sequence and data parallelism, stages, accumulation.

Dropout is on, valid tokens are uneven (some samples have none), windows hold two documents, the vocabulary does not
divide by the tensor axis, and clipping acts.
"""

from functools import cache

import pytest
import torch

from tests.layouts import SHAPES, Layout, Trained, ids, pairwise, train
from tests.tolerances import (
    GRADIENT_FP32,
    GRADIENT_FP64,
    LOSS_FP32,
    LOSS_FP64,
    WEIGHTS_FP32,
    WEIGHTS_FP64,
    difference,
    weight_differences,
)

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LOSS = {"fp32": LOSS_FP32, "fp64": LOSS_FP64}
GRADIENT = {"fp32": GRADIENT_FP32, "fp64": GRADIENT_FP64}
WEIGHTS = {"fp32": WEIGHTS_FP32, "fp64": WEIGHTS_FP64}
GRIDS = [(tp, dp) for tp in (1, 2, 4) for dp in (1, 2, 4) if tp * dp <= 8]
CASES = [
    (flavour, dtype, grid, sequence, accumulation, stage)
    for flavour in ("gpt", "llama", "gpt-untied-rotary")
    for dtype in DTYPES
    for grid in GRIDS
    for sequence in (False, True)
    if grid[0] > 1 or not sequence
    for accumulation in (1, 4)
    for stage in ((0, 1, 2, 3) if grid[1] > 1 else (1,))
]
COVER = pairwise(CASES)


@cache
def alone(flavour: str, dtype: str) -> Trained:
    """One process, one micro-batch."""
    return train(Layout(), flavour, DTYPES[dtype])


def check(flavour: str, dtype: str, grid: tuple[int, int], sequence: bool, accumulation: int, stage: int) -> None:
    expected = alone(flavour, dtype)
    found = train(Layout(*grid, sequence, accumulation, stage), flavour, DTYPES[dtype])
    assert found.initial.keys() == expected.initial.keys()
    for name, value in expected.initial.items():
        assert torch.equal(found.initial[name], value), name
    assert difference(found.losses, expected.losses) <= LOSS[dtype]
    assert difference(found.norms[:1], expected.norms[:1]) <= GRADIENT[dtype]
    assert difference(found.norms, expected.norms) <= WEIGHTS[dtype]
    heads, kv_heads = SHAPES[flavour].heads, SHAPES[flavour].kv_heads
    for kind, tolerance in (("gradients", GRADIENT[dtype]), ("weights", WEIGHTS[dtype])):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        for name, value in weight_differences(mine, theirs, heads=heads, kv_heads=kv_heads).items():
            assert value <= tolerance, f"{kind} of {name}"


@pytest.mark.parametrize("case", COVER, ids=ids(COVER))
def test_a_grid_computes_what_one_process_does(case: tuple) -> None:
    check(*case)


SAME = [((0, 1), 2), ((2, 3), 2), ((1, 2), 1)]  # stages, accumulation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tensor", "data", "sequence"), [(1, 2, False), (1, 4, False), (2, 2, True), (2, 4, False)])
@pytest.mark.parametrize(("stages", "accumulation"), SAME, ids=[f"{a}-{b}" for (a, b), _ in SAME])
def test_stages_are_equal_bit_for_bit(
    stages: tuple[int, int], accumulation: int, tensor: int, data: int, sequence: bool, dtype: str
) -> None:
    one, other = (train(Layout(tensor, data, sequence, accumulation, stage), "gpt", DTYPES[dtype]) for stage in stages)
    assert one.losses == other.losses and one.norms == other.norms
    for kind in ("gradients", "weights"):
        for name, value in getattr(one, kind).items():
            assert torch.equal(value, getattr(other, kind)[name]), f"{kind} of {name}"


REST = [case for case in CASES if case not in COVER]


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=ids(REST))
def test_every_grid_computes_what_one_process_does(case: tuple) -> None:
    check(*case)
