"""Define the schemas of the fused operations in torch's library `megazero`.

torch infers names, arguments and types from each operation's specification in plain torch (`reference`). This module
adds what a signature does not contain: which arguments an operation writes, and what it returns for tensors without
data, as torch.compile and a simulated run need. No compiler is needed for that; shared libraries only implement the
schemas, one library for each kind of device (`build`).

Common to all: T is fp32, bf16 or fp16; internal arithmetic, statistics and maxima are fp32. Arguments and results are
contiguous unless stated otherwise. "Rows" are all dimensions but the last. The order of sums over rows depends only on
the sizes (on a GPU also on its number of multiprocessors and on memory alignment), so results are bit-identical in
every run, with any number of threads. A row's result does not depend on the number of rows. NaN in a row gives NaN in
that row's results; infinities behave as in the reference.
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


def _sums(x: Tensor) -> Tensor:
    """Return one fp32 number for each column of x: [D]."""
    return x.new_empty(x.shape[-1:], dtype=torch.float32)


_RESULTS: dict[str, Callable[..., object]] = {
    # Norms. x [..., D], weight and bias [D], all of T; y is the norm of x, mean and rstd (1 / deviation) or rrms
    # (1 / root mean square) are [..., 1]. With `add_`, total = x + residual is rounded to T and y is the norm of total;
    # in backward, dx is the gradient of x and of residual, including grad_total, the gradient of the output total.
    # The last number is the offset of the weight; in the RMSNorms' forward a flag follows: round twice.
    # Gradients of vectors (weight, bias) are sums over rows in fp32, not rounded to T.
    "layer_norm": lambda x, *_: (_like(x), _statistic(x), _statistic(x)),
    "layer_norm_backward": lambda grad, x, *_: (_like(x), _sums(x), _sums(x)),
    "rms_norm": lambda x, *_: (_like(x), _statistic(x)),
    "rms_norm_backward": lambda grad, x, *_: (_like(x), _sums(x)),
    "add_layer_norm": lambda x, *_: (_like(x), _like(x), _statistic(x), _statistic(x)),
    "add_layer_norm_backward": lambda grad, more, x, *_: (_like(x), _sums(x), _sums(x)),
    "add_rms_norm": lambda x, *_: (_like(x), _like(x), _statistic(x)),
    "add_rms_norm_backward": lambda grad, more, x, *_: (_like(x), _sums(x)),
    # Activations. x, gate, up [..., F], bias [F], of T. Without a bias, its gradient is an empty tensor.
    "bias_gelu": lambda x, *_: _like(x),
    "bias_gelu_backward": lambda grad, x, bias: (_like(x), _sums(x if bias is not None else x[..., :0])),
    "swiglu": lambda gate, up: _like(gate),
    "swiglu_backward": lambda grad, gate, up: (_like(gate), _like(up)),
    # Dropout. x [S, B, D], sample_ids int64 [B], positions int64 [S]; `key` is an unsigned 32-bit word. The mask is
    # bit-identical to `counter.keep_mask` over channels 0 .. D - 1, and never stored.
    "dropout_add": lambda x, *_: _like(x),
    "dropout_backward": lambda grad, *_: _like(grad),
    # Rotary positions. x [S, B, H, d] may have any strides with a last stride of 1; cos and sin are of T,
    # [S, B or 1, 1, d], with two equal halves along d. `inverse` rotates backwards, for the backward pass.
    "rotary": lambda x, *_: _like(x),
    # The loss. logits [N, V] of T, targets int64 [N] (outside [0, V) if the target is in another part); maxima,
    # log_sums and grad are fp32 [N]. The maximum of a row of only -inf is T's lowest finite number. The forward may
    # store in `logits` anything that its own backward needs; backward overwrites it with the gradient.
    "cross_entropy_parts_": lambda logits, targets: logits.new_empty((3, logits.shape[0]), dtype=torch.float32),
    # Flat memory. `flats`: one or more tensors of one T; the sums are fp64 [flats].
    "sums_of_squares": lambda flats: flats[0].new_empty(len(flats), dtype=torch.float64),
}
_WRITTEN = {
    "cross_entropy_parts_": ("logits_NV",),
    "cross_entropy_backward_": ("exponentials_NV",),
    # Masters and moments are fp32, `published` is 16-bit, gradients are fp32 or of the dtype of `published`.
    "adamw_": ("masters", "first", "second", "published", "step"),
    "sum_rows_": ("into_D",),  # x [..., D] of any T; `into` has D elements of fp32
    "accumulate_": ("into",),  # `into` is fp32; x is of any T
    "cast_": ("into",),  # both of any T; rounded to nearest, ties to even
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
