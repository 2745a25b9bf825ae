"""The operations that exist in more than one implementation, as one value.

A run chooses once (`select.choose`), by the declared device and dtype; layers and engine receive the result and call
it. What has one implementation is called where it is.
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
    """One implementation of each operation, with the arguments and meaning of its name in `schema` and `reference`.

    Attributes:
        name: "reference" or "fused", with the families that have another; for the log.
        adamw_: the update of fp32 masters and moments that publishes 16-bit parameters; None: torch's own fused kernel,
            and a copy. All other updates are torch's.
        add_rows_: torch's own, in `reference` only: `add_rows_`, or `add_sorted_rows_`.
        wide_products: of 16-bit matrices into fp32 memory; None: a product is made in 16 bits and then widened.
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
    bias_gelu_backward: Callable[..., Tensor]
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
# Where there is no cache that passes over a slice would find it in.
WIDE_REFERENCE = replace(REFERENCE, sums_of_squares=partial(reference.sums_of_pieces, at_once=1 << 24))
