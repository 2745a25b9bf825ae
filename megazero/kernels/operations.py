"""Collect in one value the operations that have more than one implementation.

A run chooses once (`select.choose`), by the declared device and dtype, and passes the result to layers and engine. Code
calls an operation with a single implementation directly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from megazero.kernels import reference
from megazero.kernels.products import WideProducts

Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Operations:
    """One implementation of each operation; `schema` and `reference` define names, arguments and meaning.

    Attributes:
        name: "reference" or "fused", then the families with another implementation; for the log.
        adamw_: update fp32 masters and moments and write 16-bit parameters; None: torch's fused AdamW, then a copy.
            Updates in other dtypes always use torch.
        add_rows_: `add_rows_` or `add_sorted_rows_` of `reference`; there is no other kernel.
        wide_products: products of 16-bit matrices into fp32 memory; None: compute in 16 bits, then widen.
    """

    name: str
    layer_norm: Callable[..., Three]
    layer_norm_backward: Callable[..., Three]
    rms_norm: Callable[..., Two]
    rms_norm_backward: Callable[..., Two]
    add_layer_norm: Callable[..., Four]
    add_layer_norm_backward: Callable[..., Three]
    add_rms_norm: Callable[..., Three]
    add_rms_norm_backward: Callable[..., Two]
    bias_gelu: Callable[..., Tensor]
    bias_gelu_backward: Callable[..., Two]
    sum_rows_: Callable[[Tensor, Tensor, bool], None]
    swiglu: Callable[..., Tensor]
    swiglu_backward: Callable[..., Two]
    dropout_add: Callable[..., Tensor]
    dropout_backward: Callable[..., Tensor]
    rotary: Callable[..., Tensor]
    cross_entropy_parts_: Callable[..., Tensor]
    cross_entropy_backward_: Callable[..., None]
    sums_of_squares: Callable[[Sequence[Tensor]], Tensor]
    accumulate_: Callable[[Tensor, Tensor], None]
    cast_: Callable[[Tensor, Tensor], None]
    add_rows_: Callable[[Tensor, Tensor, Tensor], None]
    quantize_: Callable[[Tensor, Tensor, int], None]
    dequantize_: Callable[[Tensor, Tensor, int, bool], None]
    adamw_: Callable[..., None] | None = None
    wide_products: WideProducts | None = None


_NAMES = [name for name in Operations.__dataclass_fields__ if name not in ("name", "adamw_", "wide_products")]
REFERENCE = Operations("reference", **{name: getattr(reference, name) for name in _NAMES})
# For devices other than the CPU: slices of cache size bring nothing there.
WIDE_REFERENCE = replace(REFERENCE, sums_of_squares=partial(reference.sums_of_pieces, at_once=1 << 24))
