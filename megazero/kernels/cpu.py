"""The fused CPU kernels of csrc/cpu.cpp as `Operations`."""

from pathlib import Path

import torch
from torch import Tensor

from megazero.kernels import reference
from megazero.kernels.build import BuildError, build_cpu
from megazero.kernels.operations import Operations

_SOURCE = Path(__file__).parent / "csrc" / "cpu.cpp"
_BLOCK = 1 << 16  # kBlock of the source: elements of one partial sum


def fused_operations() -> Operations:
    """Builds the library (once per machine and torch version) and loads it.

    Raises:
        BuildError: no compiler, it failed, or its library cannot be loaded.
    """
    library = build_cpu(_SOURCE)
    try:
        torch.ops.load_library(library)
    except OSError as error:  # a cache on a file system that forbids execution, say
        raise BuildError(f"{library} cannot be loaded: {error.__cause__ or error}") from None
    return Operations("fused", bias_gelu, bias_gelu_backward, sum_of_squares)


def bias_gelu(x_NF: Tensor, bias_F: Tensor | None) -> Tensor:
    if bias_F is None:
        return reference.bias_gelu(x_NF, None)
    return torch.ops.megazero_cpu.bias_gelu(x_NF, bias_F)


def bias_gelu_backward(grad_NF: Tensor, x_NF: Tensor, bias_F: Tensor | None) -> Tensor:
    if bias_F is None:
        return reference.bias_gelu_backward(grad_NF, x_NF, None)
    return torch.ops.megazero_cpu.bias_gelu_backward(grad_NF, x_NF, bias_F)


def sum_of_squares(flat: Tensor) -> Tensor:
    partial = torch.empty(-(-len(flat) // _BLOCK), dtype=torch.float64)
    torch.ops.megazero_cpu.block_squares(flat, partial)
    return partial.sum()
