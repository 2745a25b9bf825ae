"""Attention in blocks, in 16 bits: scores and sums over blocks are wide."""

import pytest
import torch
from torch import Tensor

from megazero.model.blocked_attention import Blocked

# Products, shares and the output are each rounded to bf16, by at most 2^-9 of a value, 0.6 * 2^-9 of a norm.
ERROR = 0.006


def results(how: Blocked, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, 2, 2048, 32, generator=generator).bfloat16().to(dtype) for _ in range(4)]
    leaves = [each.requires_grad_() for each in values[:3]]
    y = how(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, values[3])]


@pytest.mark.parametrize("cap", [None, 30.0])
def test_sums_over_blocks_are_wide(cap: float | None) -> None:
    how = Blocked(None, cap, 32**-0.5)
    for ours, exact in zip(results(how, torch.bfloat16), results(how, torch.float64), strict=True):
        assert ((ours - exact).norm() / exact.norm()).item() < ERROR
