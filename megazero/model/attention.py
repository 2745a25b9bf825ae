"""Causal self-attention with grouped queries.

Shapes: S sequence, B batch, G key-value heads of this rank, Q query heads per key-value head, H = G Q query heads,
d head dim.

The projection is one weight with rows grouped by key-value head: for each group its Q query heads, then its key, then
its value. A tensor rank has one interval of it: whole groups, so that one concatenation assembles the gradient of q, k
and v; or a part of a group, if there are fewer than ranks (`shared_heads.py`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.kernels.reference import wide_dtype
from megazero.model.batch_context import BatchContext
from megazero.model.blocked_attention import Blocked
from megazero.model.linear import ColumnProducts, Linear
from megazero.model.norm import Norm, SplitNorms
from megazero.model.rotary import Rotary
from megazero.model.shared_heads import SharedHeads
from megazero.model.tape import apply
from megazero.plan.matrices import Matrix
from megazero.plan.model import Kind, Shape

# Causal attention inside documents: (q [T, H, d], k [T, G, d], v [T, G, d], first tokens of documents and the end
# (int32), length of the longest document, window, scale) -> [T, H, d].
VariableLength = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None, float], Tensor]


class Attention(nn.Module):
    """The attention layer: softmax(scale q k^T, causal) v, between two projections that the block runs.

    Args:
        rotary: of queries and of keys; None in a block without rotary positions.

    Attributes:
        how: the window, the soft cap and the scale.
        blocked: the attention of a window or a soft cap, which torch's fused attention does not compute; None: neither.
        core: the function from the projected queries, keys and values to the output of the heads. The builder
            replaces it to recompute it in backward.
        projection: the products that the block runs before the core.
        variable_length: attention over documents of different lengths in one call, also with a window; None: one call
            for each length, and windows in blocks.
        q_norm, k_norm: norms of each head (Henry et al. 2020, arXiv 2010.04245) or of all; None: no norm.
        repeats: repeat keys and values for each query head of their group, for kernels without grouped queries.
    """

    def __init__(self, shape: Shape, kind: Kind, *, rotary: Rotary | None, region: Region, ops: Operations):
        super().__init__()
        heads, kv_heads, size, ranks = shape.heads, shape.kv_heads, shape.head_dim, region.axis.size
        assert heads % kv_heads == 0 and heads % ranks == 0
        self.head_dim, self.queries_per_group = size, heads // max(kv_heads, ranks)
        self.qkv = Linear(shape.qkv_matrix, bias=shape.biased("qkv"), std=shape.init_std, region=region)
        self.projection = ColumnProducts(region, self.qkv.owner)
        if kv_heads < ranks:
            self.projection = SharedHeads(region, self.qkv.owner, shape)
        outputs = Matrix(shape.width, shape.hidden, inputs_first=True)
        self.out = Linear(outputs, bias=shape.biased("out"), std=shape.residual_std, region=region)
        self.scale = shape.attention_scale or size**-0.5
        self._window, cap = shape.window_of(kind), shape.attention_cap
        self.how = Blocked(self._window, cap, self.scale)
        self.blocked = None if self._window is None and cap is None else self.how
        self.rotary, self._ops, self._norms_first = rotary, ops, shape.qk_norm_at == "before"
        self._query_scale = shape.query_scale
        self.q_norm = self.k_norm = self._norms = self._split_norms = None
        self._norms_heads = shape.qk_norm == "head"
        if shape.qk_norm == "full" and region.axis.size > 1:
            self._split_norms = SplitNorms(shape, region.axis)
            self.q_norm, self.k_norm = self._split_norms.weights
        elif shape.qk_norm != "none":
            sizes = (size, size) if self._norms_heads else (shape.width, shape.kv_width)
            self._norms = [Norm(shape, each, ops, heads=True) for each in sizes]
            self.q_norm, self.k_norm = self._norms
        self.core: Callable[[Tensor, BatchContext], Tensor] = self._core
        self.variable_length: VariableLength | None = None
        self.repeats = False

    def _core(self, qkv: Tensor, step: BatchContext) -> Tensor:
        """Return the output of the heads, [S, B, H d], from the projection [S, B, G (Q + 2) d]."""
        documents, (length, samples, _) = step.documents, qkv.shape
        if step.cache is not None:
            return step.cache.attend(self, self.how, *self._heads(qkv, step.positions_SB))
        if self.variable_length is None or (documents is None and self._window is None):
            if documents is None:
                return self._causal(qkv, step.positions_SB)
            return documents.attend(self._causal, qkv)
        q, k, v = (rearrange(x, "s b h d -> (b s) h d") for x in self._heads(qkv, step.positions_SB))
        if documents is not None:
            bounds, longest = documents.bounds, documents.groups[-1][0]
        else:
            ends = torch.arange(0, samples * length + 1, length, dtype=torch.int32, device=qkv.device)
            bounds, longest = ends, length
        a = self.variable_length(q, k, v, bounds, longest, self._window, self.scale)
        return rearrange(a, "(b s) h d -> s b (h d)", b=samples)

    def _causal(self, qkv: Tensor, positions_SB: Tensor | None = None) -> Tensor:
        """Return causal attention without document masks: [S, B, G (Q + 2) d] -> [S, B, H d]."""
        q_SBHd, k_SBGd, v_SBGd = self._heads(qkv, positions_SB)
        q, k, v = q_SBHd.permute(1, 2, 0, 3), k_SBGd.permute(1, 2, 0, 3), v_SBGd.permute(1, 2, 0, 3)
        if self.repeats:
            k, v = (x_BGSd.repeat_interleave(self.queries_per_group, dim=1) for x_BGSd in (k, v))
        if self.blocked is not None:
            a_BHSd = self.blocked(q, k, v)
        else:
            grouped = q.shape[1] != k.shape[1]
            a_BHSd = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
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
        if self.q_norm is not None and self._norms_first:
            q, k = self._normed(q, k)
        if self.rotary is not None:
            q, k = self.rotary.rotate(positions_SB, self._ops, q, k)
        if self.q_norm is not None and not self._norms_first:
            q, k = self._normed(q, k)
        return (q if self._query_scale is None else q * self._growth(positions_SB, q)), k, v

    def _growth(self, positions_SB: Tensor | None, q_SBHd: Tensor) -> Tensor:
        """Return the factor of queries at each position, [S, B, 1, 1] (`model.query_scale`)."""
        beta, original = self._query_scale or (0.0, 1)
        places = torch.arange(len(q_SBHd), device=q_SBHd.device)[:, None] if positions_SB is None else positions_SB
        turns = torch.floor(places.to(wide_dtype(q_SBHd.dtype)) / original)
        factor = (1 + beta * torch.log(1 + turns)).to(q_SBHd.dtype).expand(q_SBHd.shape[:2])
        return factor.contiguous()[..., None, None]

    def _normed(self, q_SBHd: Tensor, k_SBGd: Tensor) -> tuple[Tensor, Tensor]:
        rows = (q_SBHd, k_SBGd) if self._norms_heads else (q_SBHd.flatten(2), k_SBGd.flatten(2))
        if self._split_norms is not None:
            q, k = apply(self._split_norms, *rows)
        else:
            q, k = (apply(norm, x) for norm, x in zip(self._norms or (), rows, strict=True))
        return q.view(q_SBHd.shape), k.view(k_SBGd.shape)
