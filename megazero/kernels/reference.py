"""Specify each fused operation in plain torch; every kernel is tested against it.

Names, arguments and shapes are those of `schema`. Operations come in pairs, forward and backward, on plain tensors; the
layers in `model/` call them, because each layer decides how to deliver a parameter's gradient. Unlike kernels they also
work in fp64. Shapes: N rows (sequence x batch), D hidden, F feed-forward, V vocabulary (this rank's part).
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.base.quantized import BLOCK, code_bytes
from megazero.kernels import counter

# On a CPU large matrices are processed in slices of rows of about this many bytes, so that all passes of an operation
# over a slice hit the cache (1 MiB: half of a typical L2 cache). Other devices use one slice.
_SLICE_BYTES = 1 << 20
_LEAST = 1e-35  # blocks with a smaller maximum become zeros: the inverse of their scale could be infinite


def layer_norm(
    x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, rstd) of y = (x - mean) / sqrt(var + eps) * w + bias, by row (Ba et al. 2016).

    Args:
        offset: w is weight + offset, added in fp32 or more.
    """
    x, weights = _for_weights(x_ND, weight_D, bias_D, offset)
    y_ND, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], *weights, eps)
    # The statistics are wide already, but for meta tensors torch (2.13) reports a narrow dtype.
    return y_ND.to(x_ND.dtype), mean.to(wide_dtype(x_ND.dtype)), rstd.to(wide_dtype(x_ND.dtype))


def layer_norm_backward(
    grad_ND: Tensor, x_ND: Tensor, mean: Tensor, rstd: Tensor, weight_D: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias; those of vectors in fp32 or more, as in all operations.

    With z = (x - mean) / deviation and h = g w:
    dx = (h - mean(h) - z mean(h z)) / deviation, dw = sum(g z), db = sum(g).
    """
    x, (weight, _) = _for_weights(x_ND, weight_D, weight_D, offset)
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad_ND.to(x.dtype), x, [x.shape[-1]], mean, rstd, weight, weight, [True, True, True]
    )
    return grad_x.to(x_ND.dtype), _wide(grad_weight), _wide(grad_bias)


def rms_norm(
    x_ND: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0, twice: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (y, 1 / rms) of y = z w with z = x / sqrt(mean(x^2) + eps), in fp32 or more (Zhang and Sennrich 2019).

    Args:
        offset: w is weight + offset, added in fp32 or more.
        twice: z is rounded to the dtype of x before the product (Llama); else only the product is (OLMo 2, Gemma).
    """
    wide = _wide(x_ND)
    rrms = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    z = (wide * rrms).to(x_ND.dtype) if twice else wide * rrms
    return (z * _moved(weight_D, offset)).to(x_ND.dtype), rrms


def rms_norm_backward(
    grad_ND: Tensor, x_ND: Tensor, rrms: Tensor, weight_D: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight.

    With z = x / rms: dx = (g w - z mean(g w z)) / rms, dw = sum(g z).
    """
    z = _wide(x_ND) * rrms
    grad_z = _wide(grad_ND) * _moved(weight_D, offset)
    grad_weight = (_wide(grad_ND) * z).reshape(-1, z.shape[-1]).sum(0)
    return (grad_z - z * (grad_z * z).mean(-1, keepdim=True)).mul_(rrms).to(x_ND.dtype), grad_weight


def add_layer_norm(
    x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x + residual, and its LayerNorm with mean and 1 / deviation."""
    total_ND = x_ND + residual_ND
    return total_ND, *layer_norm(total_ND, weight_D, bias_D, eps, offset)


def add_layer_norm_backward(
    grad_ND: Tensor,
    grad_total_ND: Tensor,
    total_ND: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight_D: Tensor,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (equal to the residual's), weight and bias."""
    grad_x, grad_weight, grad_bias = layer_norm_backward(grad_ND, total_ND, mean, rstd, weight_D, offset)
    return grad_x + grad_total_ND, grad_weight, grad_bias


def add_rms_norm(
    x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0, twice: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + residual, and its RMSNorm with 1 / rms."""
    total_ND = x_ND + residual_ND
    return total_ND, *rms_norm(total_ND, weight_D, eps, offset, twice)


def add_rms_norm_backward(
    grad_ND: Tensor, grad_total_ND: Tensor, total_ND: Tensor, rrms: Tensor, weight_D: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (equal to the residual's) and weight."""
    grad_x, grad_weight = rms_norm_backward(grad_ND, total_ND, rrms, weight_D, offset)
    return grad_x + grad_total_ND, grad_weight


def bias_gelu(x_NF: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return gelu(x + bias) in the tanh form of GPT-2 (Hendrycks and Gimpel 2016).

    gelu(v) = 0.5 v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))).
    """
    return F.gelu(x_NF if bias_F is None else x_NF + bias_F, approximate="tanh")


def bias_gelu_backward(grad_NF: Tensor, x_NF: Tensor, bias_F: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the bias, which is the sum of the former; an empty tensor without a bias."""
    grad_x = torch.ops.aten.gelu_backward(grad_NF, x_NF if bias_F is None else x_NF + bias_F, approximate="tanh")
    return grad_x, sum_rows(grad_x if bias_F is not None else grad_x[..., :0])


def sum_rows(x_ND: Tensor) -> Tensor:
    """Return the sum over all rows, [D], in fp32 or more: the gradient of a bias."""
    return x_ND[None].flatten(0, -2).sum(0, dtype=wide_dtype(x_ND.dtype))


def sum_rows_(into_D: Tensor, x_ND: Tensor, add: bool) -> None:
    """Write the sum over all rows to `into`, or add it there."""
    sums_D = sum_rows(x_ND).view_as(into_D)
    into_D.add_(sums_D) if add else into_D.copy_(sums_D)


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """Return silu(gate) * up with silu(v) = v sigmoid(v) (Shazeer 2020)."""
    return F.silu(gate_NF) * up_NF


def swiglu_backward(grad_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate, g up s (1 + gate (1 - s)) with s = sigmoid(gate), and of up, g silu(gate)."""
    grad_gate = grad_NF * up_NF
    torch.ops.aten.silu_backward(grad_gate, gate_NF, grad_input=grad_gate)
    return grad_gate, F.silu(gate_NF).mul_(grad_NF)


def dropout_add(
    x_SBD: Tensor, residual_SBD: Tensor, sample_ids_B: Tensor, positions_S: Tensor, key: int, drop: float
) -> Tensor:
    """Return residual + x * keep / (1 - drop), where keep is `counter.keep_mask`."""
    return residual_SBD + dropout_backward(x_SBD, sample_ids_B, positions_S, key, drop)


def dropout_backward(grad_SBD: Tensor, sample_ids_B: Tensor, positions_S: Tensor, key: int, drop: float) -> Tensor:
    """Return grad * keep / (1 - drop) with a recomputed mask; a product, so that NaN and infinity are not hidden."""
    channels = torch.arange(grad_SBD.shape[-1], device=grad_SBD.device)
    return (grad_SBD * counter.keep_mask(key, sample_ids_B, positions_S, channels, drop)).mul_(1.0 / (1.0 - drop))


def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021), in the half-split form of GPT-NeoX and Llama.

    Channel pairs are (i, i + d/2): y = x cos + rotate_half(x) sin, with cos and sin of shape [..., d] whose halves
    are equal. Broadcasts over heads.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, -first) if inverse else (-second, first), dim=-1) * sin


def cross_entropy_parts_(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return the cross-entropy statistics of one part of the vocabulary: [3, N], fp32 (fp64 for fp64 logits).

    For each row: its maximum m, the sum of exp(logit - m), and the target's logit (-inf if the target is outside
    [0, V), so in another part). Overwrites `logits_NV` with exp(logit - m), which backward uses, so no second matrix of
    the vocabulary's size is needed.
    """
    wide = wide_dtype(logits_NV.dtype)
    parts_3N = torch.empty(3, len(logits_NV), dtype=wide, device=logits_NV.device)
    rows = _rows(logits_NV)
    parts = (part.unbind() for part in parts_3N.split(rows, dim=1))
    slices = zip(logits_NV.split(rows), targets_N.split(rows), parts, strict=True)
    for logits, targets, (maxima, sums, picked) in slices:
        absent = (targets < 0) | (targets >= logits.shape[1])
        own = logits.gather(1, targets.masked_fill(absent, 0)[:, None]).squeeze(1)
        picked.copy_(own.masked_fill_(absent, -torch.inf))
        # In a part of only padding all logits are -inf: a finite maximum gives exponentials of 0, not NaN.
        highest = logits.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)
        maxima.copy_(highest)
        logits -= highest[:, None]
        sums.copy_(logits.exp_().sum(-1, dtype=wide))
    return parts_3N


def cross_entropy_merge(parts_T3N: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the `cross_entropy_parts_` of all parts of the vocabulary; return (losses_N, log_sums_N).

    With M the largest maximum and S the sum over parts of sum x exp(m - M): losses = log S + M - target's logit and
    log_sums = log S + M, so softmax = exp(logit - log_sums).
    """
    maxima_TN, sums_TN, picked_TN = parts_T3N.unbind(1)
    highest_N = maxima_TN.amax(0)
    logs_N = (sums_TN * (maxima_TN - highest_N).exp()).sum(0).log_()
    return logs_N - (picked_TN.amax(0) - highest_N), logs_N + highest_N


def cross_entropy_backward_(
    exponentials_NV: Tensor, maxima_N: Tensor, log_sums_N: Tensor, targets_N: Tensor, grad_N: Tensor
) -> None:
    """Overwrite the forward's exponentials with the gradient of the logits, (softmax - onehot) * grad."""
    dtype = exponentials_NV.dtype
    exponentials_NV *= ((maxima_N - log_sums_N).exp_() * grad_N)[:, None].to(dtype)
    absent = (targets_N < 0) | (targets_N >= exponentials_NV.shape[1])
    subtract = -grad_N.masked_fill(absent, 0.0).to(dtype)
    exponentials_NV.scatter_add_(1, targets_N.masked_fill(absent, 0)[:, None], subtract[:, None])


def adamw_(
    masters: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    published: Tensor,
    step: Tensor,
    divide_by: Tensor,
    skip: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update flat fp32 masters and both moments by AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019).

    Args:
        gradients: in fp32 or 16 bits; divided by `divide_by` first (unscaling and clipping).
        published: receives the updated masters, rounded.
        step: fp32, 0-dim; counts updates.
        divide_by, skip: fp32, 0-dim; if skip is 1, nothing changes.
    """
    if skip:
        return
    step += 1
    updates = float(step)
    gradients = gradients.to(masters.dtype) / divide_by
    first.lerp_(gradients, 1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    denominator = (second.sqrt() / math.sqrt(1 - beta2**updates)).add_(eps)
    masters.mul_(1 - lr * weight_decay).addcdiv_(first, denominator, value=-lr / (1 - beta1**updates))
    published.copy_(masters)


def accumulate_(into: Tensor, x: Tensor) -> None:
    """Add x to `into`."""
    into += x


def cast_(into: Tensor, x: Tensor) -> None:
    """Copy x to `into`, rounded to nearest, ties to even."""
    into.copy_(x)


def sums_of_squares(flats: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each flat tensor: fp64 [flats]; splitting a tensor changes only rounding."""
    return sums_of_pieces(flats, _SLICE_BYTES // 8)


def sums_of_pieces(flats: Sequence[Tensor], at_once: int) -> Tensor:
    """Return the sums of squares; `at_once` elements are widened to fp64 at a time."""
    totals = torch.zeros(len(flats), dtype=torch.float64, device=flats[0].device)
    for flat, total in zip(flats, totals, strict=True):
        for piece in flat.split(at_once):
            total += piece.to(torch.float64).square().sum()  # `sum` adds pairwise; a BLAS dot product may not
    return totals


def add_rows_(into_VD: Tensor, rows_N: Tensor, values_ND: Tensor) -> None:
    """Add `values[i]` to row `rows[i]` of `into`; rows may repeat."""
    into_VD.index_add_(0, rows_N, values_ND.to(into_VD.dtype))


def add_sorted_rows_(into_VD: Tensor, rows_N: Tensor, values_ND: Tensor) -> None:
    """Add rows as `add_rows_` does, in a fixed order: bit-identical in every run, also on a GPU.

    On a GPU `add_rows_` uses atomics, in the arbitrary order of threads. Here the values of each row are summed in the
    given order, and the sum is added to `into`. The sizes do not depend on the data, so the host need not wait: the
    first of a row's entries carries its sum, the others carry zeros.
    """
    rows, order = rows_N.sort(stable=True)
    starts, ends = torch.searchsorted(rows, rows), torch.searchsorted(rows, rows, right=True)
    lengths = (ends - starts) * (starts == torch.arange(len(rows), device=rows.device))
    values = _wide(values_ND.index_select(0, order))  # a 16-bit sum would lose many small values
    sums = torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)
    into_VD.index_add_(0, rows, sums.to(into_VD.dtype))


def quantize_(codes: Tensor, x: Tensor, bits: int) -> None:
    """Quantise x to integers of 8 or 4 bits with one scale per block, in the layout of `base/quantized.py`.

    A block's largest magnitude becomes 127 or 7. If it is not finite, the whole block dequantises to NaN; if it is
    below 1e-35, to zeros.
    """
    limit, scales = float((1 << (bits - 1)) - 1), scales_of(codes, x.numel(), bits)
    for part, first, width in _parts(x):
        blocks = part.to(torch.float32).view(-1, width)
        most = blocks.abs().amax(1)
        some = most.isfinite() & (most >= _LEAST)
        limits = torch.full_like(most, limit)  # a tensor: for a scalar torch multiplies by its inverse, rounding twice
        scale = torch.where(some, most / limits, torch.where(most.isfinite(), 0.0, torch.nan))
        scales[first // BLOCK :][: len(blocks)] = scale
        found = (blocks * torch.where(some, limits / most, 0.0)[:, None]).nan_to_num(0.0).round().to(torch.int8)
        if bits == 4:
            low, high = (found + 8).view(len(found), 2, -1).unbind(1)
            found = low | high << 4
        codes[code_bytes(first, bits) : code_bytes(first + len(part), bits)] = found.flatten().view(torch.uint8)


def dequantize_(into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
    """Dequantise the output of `quantize_` into `into`, rounded to its dtype; with `add`, add to `into`."""
    scales = scales_of(codes, into.numel(), bits)
    for part, first, width in _parts(into):
        found = codes[code_bytes(first, bits) : code_bytes(first + len(part), bits)].view(-1, width * bits // 8)
        if bits == 4:
            numbers = torch.cat([found & 15, found >> 4], dim=1).to(torch.float32) - 8.0
        else:
            numbers = found.view(torch.int8).to(torch.float32)
        values = (numbers * scales[first // BLOCK :][: len(numbers), None]).view(-1)
        part.copy_(part.to(wide_dtype(part.dtype)) + values) if add else part.copy_(values)


def scales_of(codes: Tensor, numel: int, bits: int) -> Tensor:
    """Return the view of the fp32 scales that follow the codes of `numel` values."""
    return codes[code_bytes(numel, bits) :][: 4 * -(-numel // BLOCK)].view(torch.float32)


def _parts(flat: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Yield (values, index of the first, block size) for all full blocks together, then for the rest."""
    whole = flat.numel() // BLOCK * BLOCK
    for first, stop, width in ((0, whole, BLOCK), (whole, flat.numel(), flat.numel() - whole)):
        if first < stop:
            yield flat[first:stop], first, width


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, masters and sums for values of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    """Return `x` in its wide dtype."""
    return x.to(wide_dtype(x.dtype))


def _moved(weight: Tensor, offset: float) -> Tensor:
    """Return weight + offset, added in the wide dtype."""
    return _wide(weight) + offset if offset else weight


def _for_weights(x: Tensor, weight: Tensor, bias: Tensor, offset: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return x and the weights of a LayerNorm, in dtypes that torch's kernel takes together.

    On a CPU weights are widened: else the kernel would not keep statistics wide, as GPU kernels do.
    """
    if x.device.type == "cpu":
        return x, (_wide(_moved(weight, offset)), _wide(bias))
    return (_wide(x), (_moved(weight, offset), _wide(bias))) if offset else (x, (weight, bias))


def _rows(matrix: Tensor) -> int:
    if matrix.device.type != "cpu":
        return max(1, len(matrix))
    return max(1, _SLICE_BYTES // (matrix.shape[1] * matrix.element_size()))
