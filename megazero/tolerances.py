"""How far two computations of the same thing may be apart, and why. Never widened to make a test pass.

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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def difference(a: Tensor | Sequence[float], b: Tensor | Sequence[float]) -> float:
    """max|a - b| / max|b|, in fp64; nan where either holds one, so that no comparison passes on it."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape and a.numel(), f"{tuple(a.shape)} against {tuple(b.shape)}"
    apart = (a - b).abs().max()
    return 0.0 if apart == 0 else float(apart / b.abs().max())


def weight_differences(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, heads: int, kv_heads: int
) -> dict[str, float]:
    """`difference` of each weight (or gradient), the rows of the key bias measured on the scale of the QKV weight.

    Softmax does not see a constant added to every score, so the key bias has a mathematically zero gradient: what is
    there is rounding noise, and Adam divides it by its own size.
    """
    assert a.keys() == b.keys()
    found = {}
    for name in b:
        if not name.endswith("attention.qkv.bias"):
            found[name] = difference(a[name], b[name])
            continue
        scale = b[name.replace("bias", "weight")].abs().max()
        mine, theirs = (tensors[name].view(kv_heads, heads // kv_heads + 2, -1) for tensors in (a, b))
        noise = float((mine[:, -2] - theirs[:, -2]).abs().max() / scale)
        mine, theirs = mine.clone(), theirs.clone()
        mine[:, -2], theirs[:, -2] = 0, 0
        found[name] = max(noise, difference(mine, theirs))
    return found


@dataclass(frozen=True)
class Tolerance:
    """Of one dtype. `weights` is also that of every number computed from weights that have been updated."""

    loss: float
    norm: float
    gradients: float
    weights: float


def tolerance_of(dtype: str) -> Tolerance:
    """In 16 bits only loss and norm are held: of a gradient near zero not one bit need be right."""
    inf = float("inf")
    return {
        "fp64": Tolerance(LOSS_FP64, GRADIENT_FP64, GRADIENT_FP64, WEIGHTS_FP64),
        "fp32": Tolerance(LOSS_FP32, GRADIENT_FP32, GRADIENT_FP32, WEIGHTS_FP32),
    }.get(dtype, Tolerance(LOSS_16_BITS, NORM_16_BITS, inf, inf))
