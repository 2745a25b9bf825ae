"""Modules of any kind train sharded as they do in one process of plain torch."""

import pytest
import torch

from tests.library.odd_modules import CASES
from tests.library.running import on_ranks, plain, trained

FP64, FP32 = 1e-12, 2e-6
BUFFERS = ("running", "num_batches", "count")  # of a rank's own samples
# In stage 3 whatever is not gathered or released at its time shows; where parameters rest whole, few cases differ.
WHOLE = ("plain", "tied", "mixed", "checkpoint, reentrant")
LAYOUTS = [
    pytest.param(case, stage, ranks, marks=() if stage == 3 or (stage == 1 and case in WHOLE) else pytest.mark.full)
    for case in CASES
    for stage, ranks in ((0, 1), (1, 2), (3, 2))
]


@pytest.mark.parametrize(("case", "stage", "ranks"), LAYOUTS)
def test_any_module_trains_as_in_one_process(case: str, stage: int, ranks: int):
    expected, norms = plain(case, ranks)
    (state, found_norms), *_ = on_ranks(ranks, trained, case, stage)
    assert list(state) == list(expected)
    tolerance = FP32 if case == "mixed" else FP64  # one block of it is in fp32
    for name, values in expected.items():
        if not any(word in name for word in BUFFERS):
            assert torch.allclose(state[name], values, rtol=tolerance, atol=tolerance), name
    assert found_norms == pytest.approx(norms, rel=tolerance)
