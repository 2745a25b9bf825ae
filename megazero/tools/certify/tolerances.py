"""The tolerances: how far two computations of the same value may differ, and why.

They are never widened to make a test pass.

The measure is max|a - b| / max|b|, over one parameter or one column of numbers. The key rows of a QKV tensor have a
mathematically zero gradient in their bias (softmax does not depend on it), so a tensor is measured as a whole, never by
its rows: relative to themselves those rows are noise.

The effect of rounding, with eps = 1.1e-16 in fp64 and 6e-8 in fp32: a loss or a gradient is a sum of some 1e2 to 1e4
products whose order depends on micro-batches and ranks. The error of such a sum grows like the square root of its
length, a few hundred eps at most.

    LOSS, GRADIENT   one step: that error, times the number of layers that it passes through.
    WEIGHTS          after at most 20 AdamW steps at lr <= 1e-3. Adam divides by the root of the second moment, so an
                     element whose gradient is near zero turns its absolute rounding error into a relative one: about
                     1e2 times more than a gradient's.
    ..._16_BITS      a run with 16-bit parameters and activations, compared with one in fp32: each number is off by up
                     to half a unit of bf16, 2^-9. A loss is a mean over some 1e2 tokens, whose errors have both signs.
                     A norm is the root of a sum of squares, so its error stays within that of the larger elements.
    STATES_..., SIZES_... one 16-bit run compared with another of the same dtype, with r the rounding of one number
                     (2^-9 in bf16, 2^-12 in fp16) and the optimizer's settings below. A gradient passes through some
                     tens of roundings a layer in forward and backward, in all about a thousand, whose errors add up
                     like a root: 32 r for the moments and the update of a parameter as a whole (|a - b| / |b|, norms).
                     In the size of the update of all matrices, or of all vectors, errors of both signs cancel: r / 2.
    REDUCED          gradients that are summed over ranks in bf16 but are wider otherwise (`zero.reduce_dtype`), against
                     one process, which sums nothing over ranks. Each rank's part and each partial sum has a relative
                     error of up to r = 2^-8, and parts of both signs are larger than their sum. So a typical error is
                     that of one or two roundings, and the largest of some 1e4 errors is four times a typical one. That
                     is 8 r for a single element of a gradient, and 4 r for the moments (the second one doubles an
                     error) and the update of a parameter as a whole. Errors of both signs cancel: r / 2 for a norm,
                     r / 4 for a size. In the certificate's steps updates change a loss by less than an eighth of it,
                     and r is the error of this change. As in 16 bits, a single weight has no tolerance: in a sum near
                     zero no bit need be right.

    CODES            values that are sent between shard ranks as integers (`zero.quantize`), compared in the same way.
                     A code is off by up to half a step, which depends on the block's largest value, about three typical
                     ones: r = 3 / (127 sqrt 12) = 2^-7 of a typical value with 8 bits, 2^-3 with 4. Gradients: each
                     parameter has its own blocks, so its error comes from its own values, once for each sender and hop;
                     in the rows of an embedding most values of a block are near zero, except a few. As with REDUCED,
                     8 r for a single element and 4 r for a parameter as a whole, but with 4 bits at most half of the
                     value; errors enter a norm as squares, so r / 2 is ample for it and for the size of an update.
                     Parameters: in each layer's forward and backward some dozens of products use weights that are off
                     by r. This adds up like a root to 2^-4 of a gradient, to twice that for a second moment, and to
                     half of it for the size of an update. A loss, at first near the entropy of the vocabulary, depends
                     on all weights, with both signs: r / 2.

    NARROW           values that rest in bf16 and are rounded stochastically with equal bits on both sides: two values
                     that differ by e are rounded differently with a probability of e / unit, and then by a unit. So as
                     a whole they differ by the root of e x unit. A unit is 2^-8 of a moment. It may be much more than
                     an update; the roundings of updates then are as large as the root of update x unit, and the
                     distance is the root of e. In the size of all updates errors of both signs cancel: a unit.

    ARRIVED          results of transfers as integers, compared with the independent reference, which starts from each
                     rank's values before the transfer. Codes are functions of values, and both sides add in one order
                     and dtype, so only the rounding of additions may differ: as in a gradient in fp64 and fp32, by one
                     unit in the last place in 16 bits.

The certificate trains with its own settings, so that an error in one of them exceeds its tolerance ten times:

    LR        the largest that WEIGHTS allows: an update is large compared with the rounding of its weight.
    EPS       Adam's eps has the size of a typical gradient, CLIP / sqrt(elements). So an element whose gradient is
              noise around zero moves by that noise, not by the learning rate in either direction, and updates differ
              about as much as gradients do. An element with a larger gradient moves as usual.
    DECAY     LR * DECAY is 2.5e-2 of a weight in each step: 50 times WEIGHTS_FP32, and as large a part of a matrix's
              update as Adam's. If it is dropped or misplaced, sizes change by more than a tenth.
    CLIP      a tenth or less of the initial gradient norm, so that it acts in every step and shows in the moments.
    VECTORS   factor on the learning rate of parameters without decay, no faster than LR: if it is lost, the size of
              their update doubles.
    LR again  an error of 2 % in it changes every size by 2 %: 20 times SIZES_BF16, 40 times WEIGHTS_FP32.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

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
NARROW = 2.0**-8

LR, DECAY, CLIP, BETAS = 1e-3, 25.0, 0.1, (0.9, 0.95)
VECTORS = 0.5


def eps_of(numel: int) -> float:
    """Return Adam's eps in the certificate of a model with `numel` elements."""
    return CLIP / math.sqrt(numel)


def difference(a: Tensor | Sequence[float], b: Tensor | Sequence[float]) -> float:
    """Return max|a - b| / max|b| in fp64; NaN if either holds NaN, so that no comparison passes."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape and a.numel(), f"{tuple(a.shape)} against {tuple(b.shape)}"
    apart = (a - b).abs().max()
    return 0.0 if apart == 0 else float(apart / b.abs().max())


def weight_differences(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, heads: int, kv_heads: int, signs: bool = False
) -> dict[str, float]:
    """Return `difference` of each weight (or gradient), with key bias rows on the scale of the QKV weight.

    With `signs` these rows are not compared.

    Softmax does not depend on a constant added to every score, so the key bias has a mathematically zero gradient: its
    computed gradient is rounding noise, which Adam divides by its own size.
    """

    def noise(mine: Tensor, theirs: Tensor, weight: Tensor) -> float:
        return 0.0 if signs else float((mine - theirs).abs().max() / weight.abs().max())

    return _by_parameter(a, b, heads, kv_heads, difference, noise)


def state_distances(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, heads: int, kv_heads: int, signs: bool = False
) -> dict[str, float]:
    """Return |a - b| / |b| of each flat moment or update, with key bias rows on the scale of the QKV weight.

    With `signs` these rows are not compared.
    """

    def noise(mine: Tensor, theirs: Tensor, weight: Tensor) -> float:
        typical = weight.norm() * math.sqrt(mine.numel() / weight.numel())
        return 0.0 if signs else _ratio((mine - theirs).norm(), typical)

    return _by_parameter(a, b, heads, kv_heads, _distance, noise)


def _by_parameter(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    heads: int,
    kv_heads: int,
    measure: Callable[[Tensor, Tensor], float],
    noise: Callable[[Tensor, Tensor, Tensor], float],
) -> dict[str, float]:
    """Return a measure of each parameter; for a QKV bias the larger of `measure` (queries, values) and `noise` (keys).

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
        scale = b.get(name.replace("bias", "weight"), theirs)  # a weight of another optimizer has no such state
        found[name] = max(own, noise(mine[:, -2], theirs[:, -2], scale))
    return found


def size_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the relative difference between the norm of all tensors of `a` together and that of `b`."""
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
        weights: for weights, and for every number computed from updated weights.
        states: for moments and updates, each parameter as a whole.
        sizes: for the size of the update of all matrices, and of all vectors.
        updates: for updates, if not as for moments.
        signs: an optimizer takes signs of gradients, also of the noise in key biases, which are not compared then.
    """

    loss: float
    norm: float
    gradients: float
    weights: float
    states: float
    sizes: float
    updates: float | None = None
    signs: bool = False


REDUCED = Tolerance(2.0**-11, 2.0**-9, 2.0**-5, math.inf, 2.0**-6, 2.0**-10)
GRADIENT_CODES = {
    8: Tolerance(2.0**-10, 2.0**-8, 2.0**-4, math.inf, 2.0**-5, 2.0**-8),
    4: Tolerance(2.0**-6, 2.0**-4, 2.0**-1, math.inf, 2.0**-1, 2.0**-4),
}
PARAMETER_CODES = {8: Tolerance(2.0**-8, 2.0**-5, 2.0**-3, math.inf, 2.0**-3, 2.0**-5)}


def tolerance_of(
    dtype: str,
    *,
    reduced: bool = False,
    parameter_bits: int | None = None,
    gradient_bits: int | None = None,
    optimizers: Collection[str] = ("adamw",),
    narrow_moments: bool = False,
    masters: bool = True,
) -> Tolerance:
    """Return the tolerances of a dtype.

    In 16 bits single elements have no tolerance: in a gradient near zero no bit need be right.

    Args:
        reduced: gradients are summed over ranks in 16 bits, and wider otherwise; this adds `REDUCED`.
        parameter_bits, gradient_bits: bits of values sent between shard ranks as integers; these add their tolerances.
        optimizers: the names of the optimizers. The size of Muon's and Lion's updates does not depend on that of their
            gradients, so where gradients have errors of whole numbers of steps, their updates have no tolerance.
        narrow_moments: optimizer state rests in bf16.
        masters: False: bf16 parameters are updated themselves.
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
    numbers = (astuple(each)[:6] for each in (own, *more))
    loss, norm, gradients, weights, states, sizes = map(sum, zip(*numbers, strict=True))
    found = Tolerance(loss, norm, gradients, weights, states, sizes)
    if more and not {"muon", "lion"}.isdisjoint(optimizers):
        found = replace(found, sizes=math.inf, updates=math.inf)
    if not masters and found.updates is None:
        found = replace(found, updates=math.sqrt(found.states), sizes=found.sizes + NARROW)
    if narrow_moments:
        found = replace(found, states=found.states + math.sqrt(found.states * NARROW))
    return replace(found, signs="lion" in optimizers)
