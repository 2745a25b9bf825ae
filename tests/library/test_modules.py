"""Modules of any kind train sharded as they do in one process of plain torch."""

import pytest
import torch

from tests.library.odd_modules import CASES
from tests.library.running import on_ranks, plain, trained

FP64, FP32 = 1e-12, 2e-6
BUFFERS = ("running", "num_batches", "count")  # of a rank's own samples


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 2)])
def test_any_module_trains_as_in_one_process(case: str, stage: int, ranks: int):
    expected, norms = plain(case, ranks)
    (state, found_norms), *_ = on_ranks(ranks, trained, case, stage)
    assert list(state) == list(expected)
    tolerance = FP32 if case == "mixed" else FP64  # one block of it is in fp32
    for name, values in expected.items():
        if not any(word in name for word in BUFFERS):
            assert torch.allclose(state[name], values, rtol=tolerance, atol=tolerance), name
    assert found_norms == pytest.approx(norms, rel=tolerance)
