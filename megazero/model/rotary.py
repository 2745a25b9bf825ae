"""Rotary positions: rotate pairs of channels of queries and keys by angles that grow with the position.

A pair i of a head with d channels turns by p f_i at position p, with f_i = theta^(-2i/d) (Su et al. 2021, eq. 15). The
other kinds of `Rope` change the frequencies, so that a model trained on `original` positions reads longer texts:

    linear      f / factor                                                    Chen et al. 2023, arXiv 2306.15595
    ntk         theta * alpha^(d/(d-2)) instead of theta                      fixed: it does not follow the length
    llama3      f / factor for wavelengths over original / low, f for those under original / high, between the two
                a mean of both, weighted by original / wavelength             Llama 3.1
    yarn        a mean of f and f / factor, whose weight falls from the pair that turns beta_fast times in `original`
                positions to the one that turns beta_slow times               Peng et al. 2023, arXiv 2309.00071
    longrope    f / short[i], or f / long[i] in a model of sequences longer than `original`    arXiv 2402.13753

yarn and longrope also multiply cos and sin by an attention factor. With `share` < 1 only that share of the pairs turns.
Which pairs turn is a matter of naming: here it is the first ones, so that all pairs are (i, i + d/2) and one kernel
serves all models. An import permutes the rows of the projection accordingly, which changes no result.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megazero.kernels.operations import Operations
from megazero.kernels.reference import wide_dtype
from megazero.plan.model import Rope


class _Rotate(torch.autograd.Function):
    """The rotation by position. Its backward is the transposed one, by the same kernel; only the angles are kept."""

    @staticmethod
    def forward(ctx: Any, x_SBHd: Tensor, cos: Tensor, sin: Tensor, ops: Operations) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.ops = ops
        return ops.rotary(x_SBHd, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()  # attention's backward sets the strides
        return ctx.ops.rotary(grad, *ctx.saved_tensors, True), None, None, None


class Rotary:
    """The rotation of queries and keys by position.

    Angles are computed in fp32 (fp64 for fp64 activations) for any dtype of the model, because bf16 is too coarse. All
    layers of a kind share one table of cos and sin, computed when the first of them runs.

    Args:
        seq_len: the model's sequence length.
    """

    def __init__(self, rope: Rope, head_dim: int, seq_len: int):
        self.rope, self.head_dim, self.seq_len = rope, head_dim, seq_len
        self._room = seq_len  # positions in the table
        self._table: tuple[Tensor, Tensor] | None = None
        self._earlier: list[tuple[Tensor, Tensor] | None] = []
        self._placed: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # (positions, their angles), a cache of one

    def reach(self, length: int) -> None:
        """Make the table long enough for texts of so many tokens."""
        if length > self._room:
            self._earlier.append(self._table)  # CUDA graphs may read it
            self._room, self._table = length, None

    def rotate(self, positions_SB: Tensor | None, ops: Operations, *heads: Tensor) -> tuple[Tensor, ...]:
        """Return queries and keys [S, B, H or G, d] rotated by position; positions None: 0 to S - 1 in each sample."""
        cos, sin = self.angles(positions_SB, heads[0])
        return tuple(_Rotate.apply(x_SBHd, cos, sin, ops) for x_SBHd in heads)

    def angles(self, positions_SB: Tensor | None, like_SBHd: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles: [S, B or 1, 1, d], in the dtype of `like_SBHd`."""
        if self._table is None or len(self._table[0]) < len(like_SBHd):
            self._table = self._computed(max(self._room, len(like_SBHd)), like_SBHd)
        cos, sin = self._table
        if positions_SB is None:
            return cos[: len(like_SBHd)], sin[: len(like_SBHd)]
        if self._placed is None or self._placed[0] is not positions_SB:
            self._placed = positions_SB, (cos[:, 0][positions_SB], sin[:, 0][positions_SB])
        return self._placed[1]

    def table_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the table."""
        return 2 * self.seq_len * self.head_dim * dtype.itemsize

    def _computed(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = wide_dtype(like.dtype), like.device
        turning = frequencies(self.rope, self.head_dim, self.seq_len, dtype, device)
        still = turning.new_zeros(self.head_dim // 2 - len(turning))
        factor = torch.cat((torch.full_like(turning, attention_factor(self.rope)), torch.ones_like(still)))
        places = torch.arange(length, device=device)[:, None, None, None].to(dtype)
        angles = places * torch.cat((turning, still))  # [S, 1, 1, d / 2]
        cos, sin = ((each * factor).to(like.dtype) for each in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def frequencies(rope: Rope, head_dim: int, seq_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the angle per position of each pair of channels that turns, in radians.

    The order of operations is that of transformers, so that angles of imported models agree to the bit.
    """
    dim = int(head_dim * rope.share)
    theta = rope.theta * rope.alpha ** (dim / (dim - 2)) if rope.kind == "ntk" else rope.theta
    powers = theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        divisors = rope.long if seq_len > rope.original else rope.short
        return 1.0 / (torch.tensor(divisors, dtype=dtype, device=device) * powers)
    if rope.kind == "llama3":
        turns = rope.original / (2 * math.pi / plain)  # in `original` positions
        share = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
        return (1 - share) * plain / rope.factor + share * plain
    if rope.kind == "yarn":
        first, last = (_pair_of(rope, turns, dim) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=dtype, device=device) - first) / (last - first or 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (rope.factor * powers) * (1 - kept) + plain * kept
    return plain


def attention_factor(rope: Rope) -> float:
    """Return the factor by which cos and sin are multiplied, so that attention does not flatten in longer texts."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all:
            return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all)
        return _mscale(rope.factor, 1.0)
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original))
    return 1.0


def _pair_of(rope: Rope, turns: float, dim: int) -> float:
    """Return the index, not rounded, of the pair that turns this often in `original` positions."""
    return dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
