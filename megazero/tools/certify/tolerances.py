"""The tolerances: how far two computations of the same thing may be apart, and why.

They are never widened to make a test pass.

The measure is max|a - b| / max|b|, over one parameter or one column of numbers. The key rows of a QKV tensor have a
mathematically zero gradient in their bias (softmax does not see it), so a tensor is measured as a whole, never by its
rows: relative to themselves those rows are noise.

What rounding does, with eps = 1.1e-16 in fp64 and 6e-8 in fp32: a loss or a gradient is a sum of some 1e2 to 1e4
products whose order depends on micro-batches and ranks. The error of such a sum grows like the square root of its
length, a few hundred eps at most.

    LOSS, GRADIENT   one step: that error, times the handful of layers it passes through.
    WEIGHTS          after at most 20 AdamW steps at lr <= 1e-3. Adam divides by the root of the second moment, so an
                     element whose gradient is near zero turns its absolute rounding error into a relative one: about
                     1e2 times more than a gradient's.
    ..._16_BITS      a run with 16-bit parameters and activations against one in fp32: each number is off by up to half
                     a unit of bf16, 2^-9; a loss is the mean over some 1e2 tokens of errors of both signs, a norm the
                     root of a sum of squares, which the error of the larger ones does not leave.
    STATES_..., SIZES_... one 16-bit run against another of the same dtype, with r the rounding of one number (2^-9 in
                     bf16, 2^-12 in fp16) and the optimizer's settings below. A gradient has passed through some tens
                     of roundings a layer, forward and back, in all about a thousand, whose errors add up like a root:
                     32 r, of a parameter as a whole (|a - b| / |b|, norms), for its moments and for its update. In the
                     size of the update of all matrices, or of all vectors, errors of both signs cancel: r / 2.
    REDUCED          gradients that are summed over ranks in bf16 and wider otherwise (`zero.reduce_dtype`), against one
                     process, which sums nothing. Each rank's part and each partial sum is off by up to r = 2^-8 of
                     itself, and parts of both signs are larger than their sum: together a typical error is that of one
                     or two roundings, and the largest of some 1e4 is four times a typical one. 8 r of a single element
                     of a gradient; 4 r of a parameter as a whole, for its moments (the second one doubles an error) and
                     its update. Errors of both signs cancel: r / 2 of a norm, r / 4 of a size. In the steps of a
                     certificate updates change a loss by less than an eighth of it, and r of that is off. A weight is
                     not held alone, as in 16 bits: of a sum near zero not one bit need be right.

    CODES            what is sent between shard ranks as integers (`zero.quantize`), likewise. A code is off by up to
                     half a step of its block's largest value, three typical ones: r = 3 / (127 sqrt 12), 2^-7, of a
                     typical value with 8 bits, 2^-3 with 4. Gradients: a parameter has blocks of its own, so an error
                     is that of its own values, of each sender and hop; in the rows of an embedding most values of a
                     block are near zero, but for a few. As with REDUCED 8 r of a single element and 4 r of a parameter
                     as a whole, but with 4 bits not more than half of it; a norm adds errors as a square: r / 2 is
                     much, and of the size of an update too. Parameters: in each layer forward and backward some dozens
                     of products see weights that are off by r, which adds up like a root to 2^-4 of a gradient, and
                     twice that of a second moment; half of it of the size of an update; a loss, at its beginning near
                     the entropy of the vocabulary, depends on all of them, with both signs: r / 2.

    ARRIVED          what comes of values that are sent as integers, against the independent reference, which starts
                     from what each rank had before: codes are functions of values, and sums are taken in one order
                     and dtype, so nothing may differ but the rounding of additions. In fp64 and fp32 as a gradient;
                     in 16 bits one unit in the last place.

The certificate trains with settings of its own, so that a wrong one shows ten times over:

    LR        the largest that WEIGHTS is made for: an update is large compared with the rounding of its weight.
    EPS       Adam's, of the size of a typical gradient, CLIP / sqrt(elements): an element whose gradient is noise
              around zero moves by noise, not by the learning rate in either direction, and an update differs about as
              much as the gradients do. An element with a larger gradient moves as ever.
    DECAY     LR * DECAY is 2.5e-2 of a weight in each step: 50 times WEIGHTS_FP32, and as much of a matrix' update as
              Adam's part. Where it is dropped or misplaced, sizes change by more than a tenth.
    CLIP      a tenth or less of a gradient norm at the beginning: it acts in every step, and the moments show it.
    VECTORS   what does not decay learns at this times the rate, no faster than LR: where the factor is lost, the size
              of its update doubles.
    LR again  2 % of it are 2 % of every size: 20 times SIZES_BF16, 40 times WEIGHTS_FP32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

LOSS_16_BITS = 2.0**-10
NORM_16_BITS = 2.0**-8
LOSS_FP64 = 1e-13
GRADIENT_FP64 = 1e-13
WEIGHTS_FP64 = 1e-11
LOSS_FP32 = 2e-6
GRADIENT_FP32 = 5e-6
WEIGHTS_FP32 = 5e-4
ARRIVED = {torch.float64: GRADIENT_FP64, torch.float32: GRADIENT_FP32, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SIZES_BF16, SIZES_FP16 = 2.0**-10, 2.0**-13
STATES_BF16, STATES_FP16 = 2.0**-4, 2.0**-7

LR, DECAY, CLIP, BETAS = 1e-3, 25.0, 0.1, (0.9, 0.95)
VECTORS = 0.5


def eps_of(numel: int) -> float:
    """Return Adam's eps in the certificate of a model with so many elements."""
    return CLIP / math.sqrt(numel)


def difference(a: Tensor | Sequence[float], b: Tensor | Sequence[float]) -> float:
    """Return max|a - b| / max|b|, in fp64; nan where either holds one, so that no comparison passes on it."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape and a.numel(), f"{tuple(a.shape)} against {tuple(b.shape)}"
    apart = (a - b).abs().max()
    return 0.0 if apart == 0 else float(apart / b.abs().max())


def weight_differences(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, heads: int, kv_heads: int
) -> dict[str, float]:
    """Return `difference` of each weight (or gradient), the key bias rows on the scale of the QKV weight.

    Softmax does not see a constant added to every score, so the key bias has a mathematically zero gradient: what is
    there is rounding noise, and Adam divides it by its own size.
    """

    def noise(mine: Tensor, theirs: Tensor, weight: Tensor) -> float:
        return float((mine - theirs).abs().max() / weight.abs().max())

    return _by_parameter(a, b, heads, kv_heads, difference, noise)


def state_distances(a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, heads: int, kv_heads: int) -> dict[str, float]:
    """Return |a - b| / |b| of each flat moment or update, the key bias rows on the scale of the QKV weight."""

    def noise(mine: Tensor, theirs: Tensor, weight: Tensor) -> float:
        typical = weight.norm() * math.sqrt(mine.numel() / weight.numel())
        return _ratio((mine - theirs).norm(), typical)

    return _by_parameter(a, b, heads, kv_heads, _distance, noise)


def _by_parameter(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    heads: int,
    kv_heads: int,
    measure: Callable[[Tensor, Tensor], float],
    noise: Callable[[Tensor, Tensor, Tensor], float],
) -> dict[str, float]:
    """Return a measure of each parameter; of a QKV bias that of queries and values, or the noise of keys if it is more.

    Args:
        noise: (keys of a, keys of b, the QKV weight of b) -> their difference.
    """
    assert a.keys() == b.keys()
    found = {}
    for name in b:
        if not name.endswith("attention.qkv.bias"):
            found[name] = measure(a[name], b[name])
            continue
        mine, theirs = (tensors[name].view(kv_heads, heads // kv_heads + 2, -1) for tensors in (a, b))
        others = [index for index in range(mine.shape[1]) if index != mine.shape[1] - 2]
        own = measure(mine[:, others], theirs[:, others])
        found[name] = max(own, noise(mine[:, -2], theirs[:, -2], b[name.replace("bias", "weight")]))
    return found


def size_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the relative difference of the norms of all of them together."""
    mine, theirs = (torch.stack([tensor.norm() for tensor in tensors]).norm() for tensors in (a, b))
    return _ratio((mine - theirs).abs(), theirs)


def _distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return _ratio((a - b).norm(), b.norm())


def _ratio(apart: Tensor, scale: Tensor) -> float:
    return 0.0 if apart == 0 else float(apart / scale)


@dataclass(frozen=True)
class Tolerance:
    """The tolerances of one dtype.

    Attributes:
        weights: of weights, and of every number computed from weights that have been updated.
        states: of moments and updates, each parameter as a whole.
        sizes: of the update of all matrices, and of all vectors.
    """

    loss: float
    norm: float
    gradients: float
    weights: float
    states: float
    sizes: float


REDUCED = Tolerance(2.0**-11, 2.0**-9, 2.0**-5, math.inf, 2.0**-6, 2.0**-10)
GRADIENT_CODES = {
    8: Tolerance(2.0**-10, 2.0**-8, 2.0**-4, math.inf, 2.0**-5, 2.0**-8),
    4: Tolerance(2.0**-6, 2.0**-4, 2.0**-1, math.inf, 2.0**-1, 2.0**-4),
}
PARAMETER_CODES = {8: Tolerance(2.0**-8, 2.0**-5, 2.0**-3, math.inf, 2.0**-3, 2.0**-5)}


def tolerance_of(
    dtype: str, *, reduced: bool = False, parameter_bits: int | None = None, gradient_bits: int | None = None
) -> Tolerance:
    """Return the tolerances of a dtype.

    In 16 bits no single element is held: of a gradient near zero not one bit need be right.

    Args:
        reduced: gradients are summed over ranks in 16 bits, and wider otherwise: what that adds comes on top.
        parameter_bits, gradient_bits: of what is sent between shard ranks as integers: the same.
    """
    own = {
        "fp64": Tolerance(LOSS_FP64, GRADIENT_FP64, GRADIENT_FP64, WEIGHTS_FP64, WEIGHTS_FP64, WEIGHTS_FP64),
        "fp32": Tolerance(LOSS_FP32, GRADIENT_FP32, GRADIENT_FP32, WEIGHTS_FP32, WEIGHTS_FP32, WEIGHTS_FP32),
        "bf16": Tolerance(LOSS_16_BITS, NORM_16_BITS, math.inf, math.inf, STATES_BF16, SIZES_BF16),
        "fp16": Tolerance(LOSS_16_BITS / 8, NORM_16_BITS / 8, math.inf, math.inf, STATES_FP16, SIZES_FP16),
    }[dtype]
    more = [REDUCED] * reduced
    more += [PARAMETER_CODES[parameter_bits]] if parameter_bits else []
    more += [GRADIENT_CODES[gradient_bits]] if gradient_bits else []
    return Tolerance(*map(sum, zip(*(astuple(each) for each in (own, *more)), strict=True)))
