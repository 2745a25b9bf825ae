"""Compute the loss of each token, with the vocabulary split over the tensor axis.

Training minimises the sum over the valid tokens of the *global* batch divided by their count, so the loss does not
depend on the split into micro-batches. A micro-batch therefore returns a sum, and the engine, which knows the global
count, divides (`zero/engine.py`).

No rank has the logits of the full vocabulary. For each row a rank computes three numbers over its part: the maximum m,
the sum s of exp(logit - m), and the target's logit if the target is in its part. One all-gather of these gives every
rank M = max m, S = sum of s exp(m - M), and the loss log S + M - target's logit.
"""

from typing import Any

import torch
from torch import Tensor

from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis
from megazero.kernels import reference
from megazero.kernels.operations import Operations


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row; the logits are overwritten, in backward by their gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, padding: int, tensor: Axis, ops: Operations) -> Tensor:
        logits_NV[:, logits_NV.shape[1] - padding :] = -torch.inf
        parts_3N = ops.cross_entropy_parts_(logits_NV, targets_N)
        losses_N, log_sums_N = reference.cross_entropy_merge(all_gather(parts_3N[None], tensor, "loss"))
        ctx.save_for_backward(parts_3N[0], log_sums_N, targets_N)
        # Not by save_for_backward: backward overwrites it on purpose, and returns it as the gradient.
        ctx.logits_NV, ctx.ops = logits_NV, ops
        return losses_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        maxima_N, log_sums_N, targets_N = ctx.saved_tensors
        logits_NV, ctx.logits_NV = ctx.logits_NV, None
        ctx.ops.cross_entropy_backward_(logits_NV, maxima_N, log_sums_N, targets_N, grads[0].contiguous())
        return logits_NV, None, None, None, None


def token_losses(
    logits_SBV: Tensor, targets_SB: Tensor, valid_SB: Tensor, *, vocab: int, tensor: Axis, ops: Operations
) -> Tensor:
    """Return -log softmax(logits)[target] in nats, 0 where not valid: [S, B], fp32 (fp64 for fp64 logits).

    The logits are overwritten. Targets of invalid positions may hold anything.

    Args:
        logits_SBV: for this rank's part of the vocabulary, padding included.
        vocab: size of the whole vocabulary; logits beyond it are padding.
        tensor: the axis that splits the vocabulary.
        ops: the kernels to use.
    """
    rows = logits_SBV.shape[-1]
    first = tensor.rank * rows
    targets_N = torch.where(valid_SB, targets_SB, 0).reshape(-1) - first
    padding = min(max(0, first + rows - vocab), rows)
    losses_N = _CrossEntropy.apply(logits_SBV.reshape(-1, rows), targets_N, padding, tensor, ops)
    return torch.where(valid_SB, losses_N.view_as(targets_SB), 0.0)
