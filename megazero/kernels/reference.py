"""Each fused operation in plain torch: the specification that every kernel is tested against.

Operations come as pairs, forward and backward, over plain tensors; the autograd functions that call them live with
their layers in `model/`, because what becomes of a parameter's gradient is the layer's business. Shapes: N rows
(sequence x batch), D hidden, F feed-forward, V vocabulary (this rank's part of it).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# On a CPU the rows of a large matrix are handled in slices of about this many bytes, so that the passes of one
# operation over a slice find it in the cache (1 MiB: half of a level-2 cache of today). Elsewhere one slice is all.
_SLICE_BYTES = 1 << 20


def layer_norm(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; returns (y, mean, 1 / std)."""
    return torch.native_layer_norm(x_ND, [x_ND.shape[-1]], weight_D, bias_D, eps)


def layer_norm_backward(
    grad_ND: Tensor, x_ND: Tensor, mean: Tensor, rstd: Tensor, weight_D: Tensor, bias_D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias."""
    return torch.ops.aten.native_layer_norm_backward(
        grad_ND, x_ND, [x_ND.shape[-1]], mean, rstd, weight_D, bias_D, [True, True, True]
    )


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019); returns (y, 1 / rms). Statistics in >= fp32."""
    wide = _wide(x_ND)
    rrms = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * rrms).to(x_ND.dtype) * weight_D, rrms


def rms_norm_backward(grad_ND: Tensor, x_ND: Tensor, rrms: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight: with z = x / rms, dx = (g w - z mean(g w z)) / rms, dw = sum(g z)."""
    z = _wide(x_ND) * rrms
    grad_z = _wide(grad_ND) * weight_D
    grad_weight = (_wide(grad_ND) * z).reshape(-1, z.shape[-1]).sum(0)
    grad_x = (grad_z - z * (grad_z * z).mean(-1, keepdim=True)).mul_(rrms)
    return grad_x.to(x_ND.dtype), grad_weight.to(weight_D.dtype)


def bias_gelu(x_NF: Tensor, bias_F: Tensor | None) -> Tensor:
    """gelu(x + bias) in the tanh form (Hendrycks and Gimpel 2016, as in GPT-2).

    gelu(v) = 0.5 v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))).
    """
    return F.gelu(x_NF if bias_F is None else x_NF + bias_F, approximate="tanh")


def bias_gelu_backward(grad_NF: Tensor, x_NF: Tensor, bias_F: Tensor | None) -> Tensor:
    """Gradient of x; that of the bias is its sum over rows."""
    before = x_NF if bias_F is None else x_NF + bias_F
    return torch.ops.aten.gelu_backward(grad_NF, before, approximate="tanh")


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return F.silu(gate_NF) * up_NF


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) in the half-split form of GPT-NeoX and Llama.

    Channel pairs are (i, i + d/2): y = x cos + rotate_half(x) sin, with cos and sin of shape [..., d] whose halves
    are equal. Broadcasts over heads.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def dropout_add(x: Tensor, residual: Tensor, keep: Tensor, drop: float) -> Tensor:
    """residual + x * keep / (1 - drop)."""
    return residual + x * keep * (1.0 / (1.0 - drop))


def cross_entropy_(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row, -log softmax(logits)[target]; fp32 (fp64 for fp64 logits).

    Overwrites `logits_NV` with exp(logits - row maximum), which with the returned 1 / row sum is all that the
    backward needs: no second matrix of the vocabulary's size ever exists. Returns (losses_N, 1 / row sums [N, 1]).
    """
    losses, inverse_sums = [], []
    for logits, targets in zip(_slices(logits_NV), targets_N.split(_rows(logits_NV)), strict=True):
        logits -= logits.amax(dim=-1, keepdim=True)
        picked = logits.gather(1, targets[:, None])
        sums = logits.exp_().sum(-1, keepdim=True, dtype=_wide_dtype(logits.dtype))
        losses.append((sums.log() - picked).squeeze(1))
        inverse_sums.append(sums.reciprocal_())
    return torch.cat(losses), torch.cat(inverse_sums)


def cross_entropy_backward_(
    exponentials_NV: Tensor, inverse_sums_N1: Tensor, targets_N: Tensor, grad_N: Tensor
) -> Tensor:
    """Gradient of the logits, (softmax - onehot) * grad, written over the forward's exponentials."""
    scale = (inverse_sums_N1 * grad_N[:, None]).to(exponentials_NV.dtype)
    exponentials_NV *= scale
    return exponentials_NV.scatter_add_(1, targets_N[:, None], -grad_N[:, None].to(exponentials_NV.dtype))


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of squares of a flat tensor in fp64: a scalar, reproducible to rounding however the tensor is cut."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(_SLICE_BYTES // 8) if flat.device.type == "cpu" else (flat,):
        wide = piece.to(torch.float64)
        total += torch.dot(wide, wide)
    return total


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    """`x` in the precision that statistics are taken in: fp32, or fp64 when it is fp64."""
    return x.to(_wide_dtype(x.dtype))


def _rows(matrix: Tensor) -> int:
    if matrix.device.type != "cpu":
        return max(1, len(matrix))
    return max(1, _SLICE_BYTES // (matrix.shape[1] * matrix.element_size()))


def _slices(matrix: Tensor) -> tuple[Tensor, ...]:
    return matrix.split(_rows(matrix))
