"""Causal self-attention with grouped queries.

Shapes: S sequence, B batch, D hidden, G key-value heads of this rank, Q query heads per key-value head,
H = G Q query heads, d head dim.

The projection is one weight with rows grouped by key-value head: for each group its Q query heads, then its key, then
its value. A rank of the tensor axis has whole groups, so its part is one interval of the weight, and one concatenation
assembles the gradient of q, k and v.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.kernels.reference import wide_dtype
from megazero.model.batch_context import BatchContext
from megazero.model.linear import ColumnLinear, RowLinear
from megazero.model.norm import Norm
from megazero.model.parameter import INITIAL_STD, residual_std
from megazero.model.tape import apply
from megazero.plan.model import Shape

# Causal attention inside documents: (q [T, H, d], k [T, G, d], v [T, G, d], first tokens of documents and the end
# (int32), length of the longest document) -> [T, H, d].
VariableLength = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class _Rotate(torch.autograd.Function):
    """The rotation by position. Its backward is the inverse rotation, by the same kernel; only the angles are kept."""

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
    """Rotary positions, with the angle p * theta^(-2i/d) for channel pair i at position p (Su et al. 2021, eq. 15).

    Angles are computed in fp32 (fp64 for fp64 activations) for any dtype of the model, because bf16 is too coarse. All
    layers share one table of cos and sin, computed when the first layer runs.
    """

    def __init__(self, head_dim: int, theta: float, seq_len: int):
        self.head_dim, self.theta, self.seq_len = head_dim, theta, seq_len
        self._table: tuple[Tensor, Tensor] | None = None
        self._placed: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # (positions, their angles), a cache of one

    def rotate(self, positions_SB: Tensor | None, ops: Operations, *heads: Tensor) -> tuple[Tensor, ...]:
        """Return queries and keys [S, B, H or G, d] rotated by position; positions None: 0 to S - 1 in each sample."""
        cos, sin = self.angles(positions_SB, heads[0])
        return tuple(_Rotate.apply(x_SBHd, cos, sin, ops) for x_SBHd in heads)

    def angles(self, positions_SB: Tensor | None, like_SBHd: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles: [S, B or 1, 1, d], in the dtype of `like_SBHd`."""
        if self._table is None or len(self._table[0]) < len(like_SBHd):
            self._table = self._computed(max(self.seq_len, len(like_SBHd)), like_SBHd)
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
        exponents = torch.arange(0, self.head_dim, 2, dtype=dtype, device=device) / self.head_dim
        angles = torch.arange(length, device=device)[:, None, None].to(dtype) * self.theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Attention(nn.Module):
    """The attention layer: softmax(q k^T / sqrt(d), causal) v, between two projections that the block runs.

    Args:
        rotary: None with learned positions.

    Attributes:
        core: the function from the projected queries, keys and values to the output of the heads. The builder
            replaces it to recompute it in backward.
        variable_length: attention over documents of different lengths in one call; None: one call for each length.
        q_norm, k_norm: norm of each head before its rotation (Henry et al. 2020, arXiv 2010.04245); None: no norm.
        repeats: repeat keys and values for each query head of their group, for kernels without grouped queries.
    """

    def __init__(self, shape: Shape, *, rotary: Rotary | None, region: Region, ops: Operations):
        super().__init__()
        hidden, heads, kv_heads, bias = shape.hidden, shape.heads, shape.kv_heads, shape.layernorm
        assert hidden % heads == 0 and heads % kv_heads == 0 and kv_heads % region.axis.size == 0
        self.head_dim = hidden // heads
        self.queries_per_group = heads // kv_heads
        rows = kv_heads * (self.queries_per_group + 2) * self.head_dim
        self.qkv = ColumnLinear(hidden, rows, bias=bias, std=INITIAL_STD, region=region)
        self.out = RowLinear(heads * self.head_dim, hidden, bias=bias, std=residual_std(shape.layers), region=region)
        self.rotary, self._ops = rotary, ops
        self.q_norm = self.k_norm = None
        if shape.qk_norm == "head":
            norms = (Norm("rmsnorm", self.head_dim, shape.norm_eps, ops, partial=True) for _ in range(2))
            self.q_norm, self.k_norm = norms
        self.core: Callable[[Tensor, BatchContext], Tensor] = self._core
        self.variable_length: VariableLength | None = None
        self.repeats = False

    def _core(self, qkv: Tensor, step: BatchContext) -> Tensor:
        """Return the output of the heads, [S, B, H d], from the projection [S, B, G (Q + 2) d]."""
        documents = step.documents
        if documents is None:
            return self._causal(qkv)
        if self.variable_length is None:
            return documents.attend(self._causal, qkv)
        q, k, v = (rearrange(x, "s b h d -> (b s) h d") for x in self._heads(qkv, step.positions_SB))
        a = self.variable_length(q, k, v, documents.bounds, documents.longest)
        return rearrange(a, "(b s) h d -> s b (h d)", b=qkv.shape[1])

    def _causal(self, qkv: Tensor) -> Tensor:
        """Return causal attention without document masks: [S, B, G (Q + 2) d] -> [S, B, H d]."""
        q_SBHd, k_SBGd, v_SBGd = self._heads(qkv, None)
        q, k, v = q_SBHd.permute(1, 2, 0, 3), k_SBGd.permute(1, 2, 0, 3), v_SBGd.permute(1, 2, 0, 3)
        if self.repeats:
            k, v = (x_BGSd.repeat_interleave(self.queries_per_group, dim=1) for x_BGSd in (k, v))
        a_BHSd = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return a_BHSd.permute(2, 0, 1, 3).flatten(2)

    def _heads(self, qkv: Tensor, positions_SB: Tensor | None) -> tuple[Tensor, ...]:
        """Return q [S, B, H, d], k and v [S, B, G, d] (views into one projection where the layout allows it)."""
        per_group = self.queries_per_group
        qkv = qkv.view(*qkv.shape[:2], -1, per_group + 2, self.head_dim)
        if per_group == 1:
            # the backward of unbind is a single stack; split would need one more reshape
            q, k, v = qkv.unbind(dim=3)
        else:
            q, k, v = qkv.split((per_group, 1, 1), dim=3)
            q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = apply(self.q_norm, q), apply(self.k_norm, k)
        if self.rotary is not None:
            q, k = self.rotary.rotate(positions_SB, self._ops, q, k)
        return q, k, v
