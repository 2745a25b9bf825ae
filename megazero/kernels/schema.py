"""The schemas of the fused operations: names, arguments and results, as torch's library `megazero`.

Written once, here, and without a compiler: the schemas, and of each operation what it returns for tensors without data,
which is all that torch.compile and a simulated run need. Shared libraries only implement them, one for each kind of
device (`build`); what they compute is specified in plain torch under the same names (`reference`).

Common to all. T is fp32, bf16 or fp16; arithmetic inside, statistics and maxima are fp32. Tensors are contiguous, and
results are, unless said otherwise. "Rows" are all dimensions but the last. Sums over rows are made in an order that
depends on the sizes alone (on a GPU on its number of multiprocessors and on how memory is aligned, too): the same bits
in every run, with any number of threads. What a row becomes does not depend on how many rows there are. NaN in a row
gives NaN in that row's results; infinities are as in the reference.
"""

from collections.abc import Callable

import torch
from torch import Tensor

NAMESPACE = "megazero"


def _operation(schema: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Define the operation that a function has the name of; the function returns what comes out, without data."""

    def define(fake: Callable[..., object]) -> Callable[..., object]:
        name = f"{NAMESPACE}::{fake.__name__}"
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(name, fake)
        return fake

    return define


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _statistic(x: Tensor) -> Tensor:
    """Return one fp32 number for each row of x: [..., 1]."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


# Norms. x [..., D], weight and bias [D], all of T; y is the norm of x, mean and rstd (1 / deviation) or rrms
# (1 / root mean square) are [..., 1]. With `add_`, total = x + residual is rounded to T and y is the norm of that;
# backward, dx is the gradient of both x and residual, grad_total (what reaches total by other ways) included.


@_operation("(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, rstd)."""
    return _like(x), _statistic(x), _statistic(x)


@_operation("(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight) -> (Tensor, Tensor, Tensor)")
def layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias)."""
    return _like(x), _like(weight), _like(weight)


@_operation("(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, rrms)."""
    return _like(x), _statistic(x)


@_operation("(Tensor grad, Tensor x, Tensor rrms, Tensor weight) -> (Tensor, Tensor)")
def rms_norm_backward(grad: Tensor, x: Tensor, rrms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight)."""
    return _like(x), _like(weight)


@_operation("(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (total, y, mean, rstd)."""
    return _like(x), _like(x), _statistic(x), _statistic(x)


@_operation(
    "(Tensor grad, Tensor grad_total, Tensor total, Tensor mean, Tensor rstd, Tensor weight)"
    " -> (Tensor, Tensor, Tensor)"
)
def add_layer_norm_backward(
    grad: Tensor, grad_total: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias)."""
    return _like(total), _like(weight), _like(weight)


@_operation("(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, y, rrms)."""
    return _like(x), _like(x), _statistic(x)


@_operation("(Tensor grad, Tensor grad_total, Tensor total, Tensor rrms, Tensor weight) -> (Tensor, Tensor)")
def add_rms_norm_backward(
    grad: Tensor, grad_total: Tensor, total: Tensor, rrms: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight)."""
    return _like(total), _like(weight)


# Activations. x, gate, up [..., F], bias [F], of T.


@_operation("(Tensor x, Tensor? bias) -> Tensor")
def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return gelu(x + bias), in the tanh form."""
    return _like(x)


@_operation("(Tensor grad, Tensor x, Tensor? bias) -> Tensor")
def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gradient of x; that of the bias is its sum over rows."""
    return _like(x)


@_operation("(Tensor gate, Tensor up) -> Tensor")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return _like(gate)


@_operation("(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    return _like(gate), _like(up)


# Dropout. x [S, B, D], sample_ids int64 [B], positions int64 [S]; `key` is an unsigned 32-bit word. The mask
# is `counter.keep_mask` bit for bit, over channels 0 .. D - 1; nobody stores it.


@_operation("(Tensor x, Tensor residual, Tensor sample_ids, Tensor positions, int key, float drop) -> Tensor")
def dropout_add(x: Tensor, residual: Tensor, sample_ids: Tensor, positions: Tensor, key: int, drop: float) -> Tensor:
    """Return residual + x * keep / (1 - drop)."""
    return _like(x)


@_operation("(Tensor grad, Tensor sample_ids, Tensor positions, int key, float drop) -> Tensor")
def dropout_backward(grad: Tensor, sample_ids: Tensor, positions: Tensor, key: int, drop: float) -> Tensor:
    """Return grad * keep / (1 - drop)."""
    return _like(grad)


# Rotary positions.


@_operation("(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor")
def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotate x [S, B, H, d], which may have any strides whose last is 1.

    cos and sin are of T, [S, B or 1, 1, d], with equal halves of d. `inverse` turns the other way: the backward.
    """
    return _like(x)


# The loss. logits [N, V] of T, targets int64 [N] (any number where the target lies in another part).


@_operation("(Tensor(a!) logits, Tensor targets) -> Tensor")
def cross_entropy_parts_(logits: Tensor, targets: Tensor) -> Tensor:
    """Return [3, N] fp32: maximum m, sum of exp(logit - m), target's logit or -inf.

    The maximum of a row that is -inf throughout is T's lowest finite number. May leave in `logits` whatever its own
    backward needs.
    """
    return logits.new_empty((3, logits.shape[0]), dtype=torch.float32)


@_operation("(Tensor(a!) logits, Tensor maxima, Tensor log_sums, Tensor targets, Tensor grad) -> ()")
def cross_entropy_backward_(logits: Tensor, maxima: Tensor, log_sums: Tensor, targets: Tensor, grad: Tensor) -> None:
    """Write (softmax - onehot) * grad over what the forward left; maxima, log_sums and grad are fp32 [N]."""


# Flat memory.


@_operation(
    "(Tensor(a!) master, Tensor grad, Tensor(b!) first, Tensor(c!) second, Tensor(d!) published, Tensor(e!) step,"
    " Tensor divide_by, Tensor skip, float lr, float beta1, float beta2, float eps, float weight_decay) -> ()"
)
def adamw_(*arguments: object) -> None:
    """Update by AdamW; master and both moments are fp32, grad fp32 or as `published`, which is of 16 bits."""


@_operation("(Tensor[] flats) -> Tensor")
def sums_of_squares(flats: list[Tensor]) -> Tensor:
    """Return the sum of squares of each of some flat tensors of one T, at least one: fp64 [flats]."""
    return flats[0].new_empty(len(flats), dtype=torch.float64)


@_operation("(Tensor(a!) into, Tensor x) -> ()")
def accumulate_(into: Tensor, x: Tensor) -> None:
    """Add x, of any T, to `into`, which is fp32."""


@_operation("(Tensor(a!) into, Tensor x) -> ()")
def cast_(into: Tensor, x: Tensor) -> None:
    """Write x into `into`, rounded to nearest, ties to even; each of any T."""


# Quantised values, as `base/quantized.py` lays them out: codes of 8 or 4 bits, then an fp32 scale for each block of
# 256. The number of values is a multiple of 16.


@_operation("(Tensor(a!) codes, Tensor x, int bits) -> ()")
def quantize_(codes: Tensor, x: Tensor, bits: int) -> None:
    """Write x, of any T, as integers times its block's scale, rounded to nearest; codes are uint8."""


@_operation("(Tensor(a!) into, Tensor codes, int bits, bool add) -> ()")
def dequantize_(into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
    """Write what the codes mean into `into`, of any T, rounded; or add it to what `into` holds."""
