"""Products of 16-bit matrices that are written, or added, in fp32, with no rounding to 16 bits between.

torch has them for GPUs (`mm` and `addmm` with a dtype of the result). Whether this torch, on this device, has them and
adds in place is not asked but tried, once, on a product whose every sum is a whole number that 16 bits do not hold.
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
    """The two ways in which a product gets into fp32 memory: `write` over what it holds, `add` to it."""

    write: Product
    add: Product


def _mm(into: Tensor, left: Tensor, right: Tensor) -> None:
    torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=into)


def _addmm(into: Tensor, left: Tensor, right: Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(into, left, right, torch.float32, out=into)


def wide_products(
    device: torch.device, dtype: torch.dtype, write: Product = _mm, add: Product = _addmm
) -> WideProducts | None:
    """Return the products of matrices of `dtype` on a device, as far as they prove right; None: there are none.

    Where only writing does, a product is added by way of memory of its own.

    Args:
        write, add: what is tried.
    """

    def whole(rows: int, columns: int) -> Tensor:
        numbers = torch.arange(rows * columns, device=device) * 7 % _NUMBERS
        return numbers.view(rows, columns).to(dtype)

    left, right = whole(_INNER, _ROWS).T, whole(_INNER, _COLUMNS)  # a weight's gradient has a transposed factor
    product = (left.to(torch.float64) @ right.to(torch.float64)).to(torch.float32)

    def is_right(operation: Product, before: float, after: Tensor) -> bool:
        into = torch.full_like(product, before)
        try:
            operation(into, left, right)
        except (RuntimeError, AttributeError):  # there is none for this device, or not in this torch
            return False
        return torch.equal(into, after)

    if not is_right(write, torch.nan, product):
        _LOG.info("weight gradients: in %s, then widened (no product with a result in fp32)", dtype)
        return None
    if is_right(add, 1.0, product + 1.0):
        _LOG.info("weight gradients: in fp32 out of one product")
        return WideProducts(write, add)

    def write_and_add(into: Tensor, left: Tensor, right: Tensor) -> None:
        own = torch.empty_like(into)
        write(own, left, right)
        into.add_(own)

    _LOG.info("weight gradients: in fp32, added in a pass of their own (addmm does not add in place)")
    return WideProducts(write, write_and_add)
