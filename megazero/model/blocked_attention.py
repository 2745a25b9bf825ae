"""Causal attention in blocks of queries, for layers that torch's fused attention does not compute: windows, soft caps.

A block of queries meets only the keys that some of its queries attend to, so no [S, S] matrix exists, and a window's
work grows with S w, not with S^2. Backward computes each block again, so that only q, k and v are kept.

Shapes: S sequence, B batch, G key-value heads, H query heads, d head dim; n queries and m keys of one block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.reference import wide_dtype
from megazero.plan.model import Shape


@dataclass(frozen=True)
class Blocked:
    """Causal attention with a window, a soft cap, or both.

    Attributes:
        window: a query attends to this many keys, the one at its own position and those before it; None: all before.
        cap: scores become cap tanh(score / cap), before the mask (Bello et al. 2016, arXiv 1611.09940); None: no cap.
        scale: multiplies the scores.
    """

    window: int | None
    cap: float | None
    scale: float

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor) -> Tensor:
        """Return softmax(scores) v, [B, H, S, d]; H is a multiple of G."""
        return _Attend.apply(q_BHSd, k_BGSd, v_BGSd, self)

    def blocks(self, length: int) -> Iterator[tuple[slice, slice]]:
        """Yield the queries of each block, and the keys that some of them attend to."""
        step = Shape.block_length(self.window)
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield slice(start, stop), slice(0 if self.window is None else max(0, start - self.window + 1), stop)

    def sees(self, behind: Tensor) -> Tensor:
        """Return whether a query attends to a key that is so many positions before it."""
        return behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)

    def attend(self, q_BHnd: Tensor, k_BGmd: Tensor, v_BGmd: Tensor, sees: Tensor | None = None) -> Tensor:
        """Return the output of one block: [B, H, n, d].

        Args:
            sees: which keys each query attends to, bool [..., n, m]; None: the last query and the last key are at one
                position.
        """
        n, m = q_BHnd.shape[2], k_BGmd.shape[2]
        if sees is None:
            behind = torch.arange(m - n, m, device=q_BHnd.device)[:, None] - torch.arange(m, device=q_BHnd.device)
            sees = self.sees(behind)
        groups = q_BHnd.shape[1] // k_BGmd.shape[1]
        if self.cap is None:
            return F.scaled_dot_product_attention(
                q_BHnd, k_BGmd, v_BGmd, attn_mask=sees, scale=self.scale, enable_gqa=groups > 1
            )
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_BGmd, v_BGmd))
        turned = torch.matmul(q_BHnd, k.mT).to(wide_dtype(q_BHnd.dtype)).mul_(self.scale / self.cap).tanh_()
        return torch.matmul(turned.mul(self.cap).masked_fill_(~sees, -torch.inf).softmax(-1).to(v.dtype), v)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: Blocked) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = how
        found = [how.attend(q[:, :, own], k[:, :, seen], v[:, :, seen]) for own, seen in how.blocks(q.shape[2])]
        return torch.cat(found, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole, how = ctx.saved_tensors, ctx.how
        sums = [torch.zeros_like(whole[0])]
        sums += [torch.zeros_like(each, dtype=wide_dtype(each.dtype)) for each in whole[1:]]  # of several blocks
        for own, seen in how.blocks(whole[0].shape[2]):
            parts = [x[:, :, at].detach().requires_grad_() for x, at in zip(whole, (own, seen, seen), strict=True)]
            with torch.enable_grad():
                found = how.attend(*parts)
            parts = [*torch.autograd.grad(found, parts, grads[0][:, :, own])]
            del found
            for total, at in zip(reversed(sums), (seen, seen, own), strict=True):
                total[:, :, at] += parts.pop()  # freed before the next block
        return *(total.to(x.dtype) for total, x in zip(sums, whole, strict=True)), None
