"""The operations that exist in more than one implementation, as one value.

A run chooses once (`choice.choose`), by the declared device and dtype; layers and engine receive the result and call
it. Operations that have only their reference are called there directly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from megazero.kernels import reference


@dataclass(frozen=True)
class Operations:
    """One implementation of each; signatures and meaning are those of the same names in `reference`.

    Attributes:
        name: "reference" or "fused", for the log.
        adamw_: the update of fp32 masters and moments that publishes 16-bit parameters; None: torch's own fused kernel,
            and a copy. All other updates are torch's.
    """

    name: str
    bias_gelu: Callable[[Tensor, Tensor | None, bool], Tensor]
    bias_gelu_backward: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]
    sum_of_squares: Callable[[Tensor], Tensor]
    adamw_: Callable[..., None] | None = None


REFERENCE = Operations("reference", reference.bias_gelu, reference.bias_gelu_backward, reference.sum_of_squares)
# Where there is no cache that passes over a slice would find it in.
WIDE_REFERENCE = replace(REFERENCE, sum_of_squares=partial(reference.sum_of_squares, at_once=1 << 24))
