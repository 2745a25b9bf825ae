"""Sums of many gradients of one token, where a run repeats its bits, are as near as those of one that does not."""

import torch

from megazero.kernels.reference import add_rows_, add_sorted_rows_


def test_a_frequent_row_is_summed_as_well_as_without_sorting() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (4000,), generator=generator)
    values = torch.randn(4000, 8, generator=generator).bfloat16()
    exact = torch.zeros(9, 8, dtype=torch.float64).index_add_(0, rows, values.double())
    errors = []
    for add in (add_rows_, add_sorted_rows_):
        into = torch.zeros(9, 8, dtype=torch.bfloat16)
        add(into, rows, values)
        errors.append((into.double() - exact).abs().max().item())
    assert errors[1] <= 2 * errors[0], errors
