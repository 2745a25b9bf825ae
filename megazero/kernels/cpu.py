"""The fused CPU kernels of csrc/cpu.cpp as `Operations`."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megazero.kernels import reference
from megazero.kernels.build import BuildError, build_cpu
from megazero.kernels.operations import Operations

_SOURCE = Path(__file__).parent / "csrc" / "cpu.cpp"
_BLOCK = 1 << 16  # kBlock of the source: elements of one partial sum


def fused_operations(dtype: torch.dtype) -> Operations:
    """Builds the library (once per machine and torch version) and loads it; for parameters of `dtype`, fp32 or 16 bits.

    Raises:
        BuildError: no compiler, it failed, or its library cannot be loaded.
    """
    _load(build_cpu(_SOURCE))
    if dtype == torch.float32:
        return Operations("fused", bias_gelu, bias_gelu_backward, sum_of_squares, adamw_)
    return Operations("fused", reference.bias_gelu, reference.bias_gelu_backward, sum_of_squares, adamw_)


@cache
def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:  # a cache on a file system that forbids execution, say
        raise BuildError(f"{library} cannot be loaded: {error.__cause__ or error}") from None
    # What they return, for tensors without data.
    torch.library.register_fake("megazero_cpu::bias_gelu", lambda x, bias: torch.empty_like(x))
    torch.library.register_fake("megazero_cpu::bias_gelu_backward", lambda grad, x, bias: torch.empty_like(x))
    for in_place in ("block_squares", "adamw_"):
        torch.library.register_fake(f"megazero_cpu::{in_place}", lambda *arguments: None)


def bias_gelu(x_NF: Tensor, bias_F: Tensor | None, tanh: bool) -> Tensor:
    if bias_F is None or not tanh:
        return reference.bias_gelu(x_NF, bias_F, tanh)
    return torch.ops.megazero_cpu.bias_gelu(x_NF, bias_F)


def bias_gelu_backward(grad_NF: Tensor, x_NF: Tensor, bias_F: Tensor | None, tanh: bool) -> Tensor:
    if bias_F is None or not tanh:
        return reference.bias_gelu_backward(grad_NF, x_NF, bias_F, tanh)
    return torch.ops.megazero_cpu.bias_gelu_backward(grad_NF, x_NF, bias_F)


def adamw_(
    masters: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    published: Tensor,
    step: Tensor,
    divide_by: Tensor,
    skip: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    torch.ops.megazero_cpu.adamw_(
        masters, gradients, first, second, published, step, divide_by, skip, lr, beta1, beta2, eps, weight_decay
    )


def sum_of_squares(flat: Tensor) -> Tensor:
    if flat.dtype != torch.float32:
        return reference.sum_of_squares(flat)
    partial = torch.empty(-(-len(flat) // _BLOCK), dtype=torch.float64)
    torch.ops.megazero_cpu.block_squares(flat, partial)
    return partial.sum()
