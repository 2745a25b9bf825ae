"""Multiply 16-bit matrices and write or add the product in fp32, without rounding to 16 bits in between.

torch has this for GPUs (`mm` and `addmm` with a result dtype). A trial shows once whether this torch, on this device,
has it and adds in place: the trial's sums are integers that 16 bits cannot represent.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], object]  # (into, left, right)
_LOG = logging.getLogger("megazero")
_ROWS, _INNER, _COLUMNS, _NUMBERS = 16, 32, 24, 31


@dataclass(frozen=True)
class WideProducts:
    """Two functions (into, left, right) for fp32 `into`: `write` overwrites it with left @ right, `add` adds to it."""

    write: Product
    add: Product


def _mm(into: Tensor, left: Tensor, right: Tensor) -> None:
    torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=into)


def _addmm(into: Tensor, left: Tensor, right: Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(into, left, right, torch.float32, out=into)


def wide_products(
    device: torch.device, dtype: torch.dtype, write: Product = _mm, add: Product = _addmm
) -> WideProducts | None:
    """Try `write` and `add` with `dtype` on a device; return those to use, or None if `write` is wrong or missing.

    If only `write` works, the returned `add` writes the product to a temporary tensor and adds that.

    Args:
        write, add: the functions to try.
    """

    def whole(rows: int, columns: int) -> Tensor:
        return (torch.arange(rows * columns, device=device) * 7 % _NUMBERS).view(rows, columns).to(dtype)

    left, right = whole(_INNER, _ROWS).T, whole(_INNER, _COLUMNS)  # a weight's gradient has a transposed factor
    product = (left.to(torch.float64) @ right.to(torch.float64)).to(torch.float32)

    def is_right(operation: Product, before: float, after: Tensor) -> bool:
        into = torch.full_like(product, before)
        try:
            operation(into, left, right)
        except (RuntimeError, AttributeError):  # not available on this device, or in this torch
            return False
        return torch.equal(into, after)

    if not is_right(write, torch.nan, product):
        _LOG.info("weight gradients: in %s, then widened (no matrix product with an fp32 result)", dtype)
        return None
    if is_right(add, 1.0, product + 1.0):
        _LOG.info("weight gradients: in fp32, added by the matrix product")
        return WideProducts(write, add)

    def write_and_add(into: Tensor, left: Tensor, right: Tensor) -> None:
        own = torch.empty_like(into)
        write(own, left, right)
        into.add_(own)

    _LOG.info("weight gradients: in fp32, added in a separate pass (addmm does not add in place)")
    return WideProducts(write, write_and_add)
