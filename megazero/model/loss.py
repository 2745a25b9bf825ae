"""The loss of each token.

What training minimises is the sum over the valid tokens of the *global* batch divided by their count, so that the
loss does not depend on how the batch was cut. A micro-batch therefore returns a sum, and whoever knows the global
count divides (`zero/update.py`).
"""

from typing import Any

import torch
from torch import Tensor

from megazero.kernels import reference as ops


class _CrossEntropy(torch.autograd.Function):
    """Loss per row. The logits are overwritten, and their gradient takes their place."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        losses_N, inverse_sums_N1 = ops.cross_entropy_(logits_NV, targets_N)
        ctx.save_for_backward(inverse_sums_N1, targets_N)
        # Not through save_for_backward: it is written in place, on purpose, and returned as the gradient.
        ctx.exponentials_NV = logits_NV
        return losses_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inverse_sums_N1, targets_N = ctx.saved_tensors
        exponentials_NV, ctx.exponentials_NV = ctx.exponentials_NV, None
        return ops.cross_entropy_backward_(exponentials_NV, inverse_sums_N1, targets_N, grads[0]), None


def token_losses(logits_SBV: Tensor, targets_SB: Tensor, valid_SB: Tensor) -> Tensor:
    """-log softmax(logits)[target] in nats, 0 where a target is not valid: [S, B], fp32 (fp64 for fp64 logits).

    The logits are overwritten. Targets of invalid positions may hold anything.
    """
    targets_N = torch.where(valid_SB, targets_SB, 0).reshape(-1)
    losses_N = _CrossEntropy.apply(logits_SBV.reshape(-1, logits_SBV.shape[-1]), targets_N)
    return torch.where(valid_SB, losses_N.view_as(targets_SB), 0.0)
