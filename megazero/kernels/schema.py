"""The schemas of the fused operations, as torch's library `megazero`.

torch infers names, arguments and types from the specification of each operation in plain torch (`reference`). Here
stands what a signature does not say, and no compiler is needed for it: which arguments an operation writes, and what it
returns for tensors without data, which is all that torch.compile and a simulated run need. Shared libraries only
implement the schemas, one for each kind of device (`build`).

Common to all. T is fp32, bf16 or fp16; arithmetic inside, statistics and maxima are fp32. Tensors are contiguous, and
results are, unless said otherwise. "Rows" are all dimensions but the last. Sums over rows are made in an order that
depends on the sizes alone (on a GPU on its number of multiprocessors and on how memory is aligned, too): the same bits
in every run, with any number of threads. What a row becomes does not depend on how many rows there are. NaN in a row
gives NaN in that row's results; infinities are as in the reference.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.kernels import reference

NAMESPACE = "megazero"


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _statistic(x: Tensor) -> Tensor:
    """Return one fp32 number for each row of x: [..., 1]."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


_RESULTS: dict[str, Callable[..., object]] = {
    # Norms. x [..., D], weight and bias [D], all of T; y is the norm of x, mean and rstd (1 / deviation) or rrms
    # (1 / root mean square) are [..., 1]. With `add_`, total = x + residual is rounded to T and y is the norm of that;
    # backward, dx is the gradient of both x and residual, grad_total (what reaches total by other ways) included.
    "layer_norm": lambda x, *_: (_like(x), _statistic(x), _statistic(x)),
    "layer_norm_backward": lambda grad, x, mean, rstd, weight: (_like(x), _like(weight), _like(weight)),
    "rms_norm": lambda x, *_: (_like(x), _statistic(x)),
    "rms_norm_backward": lambda grad, x, rrms, weight: (_like(x), _like(weight)),
    "add_layer_norm": lambda x, *_: (_like(x), _like(x), _statistic(x), _statistic(x)),
    "add_layer_norm_backward": lambda grad, more, x, mean, rstd, weight: (_like(x), _like(weight), _like(weight)),
    "add_rms_norm": lambda x, *_: (_like(x), _like(x), _statistic(x)),
    "add_rms_norm_backward": lambda grad, more, x, rrms, weight: (_like(x), _like(weight)),
    # Activations. x, gate, up [..., F], bias [F], of T.
    "bias_gelu": lambda x, *_: _like(x),
    "bias_gelu_backward": lambda grad, x, *_: _like(x),
    "swiglu": lambda gate, up: _like(gate),
    "swiglu_backward": lambda grad, gate, up: (_like(gate), _like(up)),
    # Dropout. x [S, B, D], sample_ids int64 [B], positions int64 [S]; `key` is an unsigned 32-bit word. The mask is
    # `counter.keep_mask` bit for bit, over channels 0 .. D - 1; it is never stored.
    "dropout_add": lambda x, *_: _like(x),
    "dropout_backward": lambda grad, *_: _like(grad),
    # Rotary positions. x [S, B, H, d] may have any strides whose last is 1; cos and sin are of T, [S, B or 1, 1, d],
    # with equal halves of d. `inverse` turns the other way: the backward.
    "rotary": lambda x, *_: _like(x),
    # The loss. logits [N, V] of T, targets int64 [N] (any number where the target is in another part); maxima,
    # log_sums and grad are fp32 [N]. The maximum of a row that is -inf throughout is T's lowest finite number. The
    # forward may leave in `logits` whatever its own backward needs, which writes the gradient over it.
    "cross_entropy_parts_": lambda logits, targets: logits.new_empty((3, logits.shape[0]), dtype=torch.float32),
    # Flat memory. Sums are of tensors of one T, at least one: fp64 [flats].
    "sums_of_squares": lambda flats: flats[0].new_empty(len(flats), dtype=torch.float64),
}
_WRITTEN = {
    "cross_entropy_parts_": ("logits_NV",),
    "cross_entropy_backward_": ("exponentials_NV",),
    # Masters and moments are fp32, gradients fp32 or as `published`, which is of 16 bits.
    "adamw_": ("masters", "first", "second", "published", "step"),
    "accumulate_": ("into",),  # which is fp32; x is of any T
    "cast_": ("into",),  # each of any T; rounded to nearest, ties to even
    # Quantised values, as `base/quantized.py` lays them out: codes (uint8) of 8 or 4 bits, then an fp32 scale for each
    # block of 256. The number of values is a multiple of 16; x and into are of any T.
    "quantize_": ("codes",),
    "dequantize_": ("into",),
}
OPERATIONS = tuple(dict.fromkeys([*_RESULTS, *_WRITTEN]))


def _define(name: str) -> None:
    inferred = torch.library.infer_schema(getattr(reference, name), mutates_args=_WRITTEN.get(name, ()))
    whole = f"{NAMESPACE}::{name}"
    torch.library.define(whole, inferred.replace("SymInt", "int"), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(whole, _RESULTS.get(name, lambda *_: None))


for _name in OPERATIONS:
    _define(_name)
