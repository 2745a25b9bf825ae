"""Compute the loss of each token from the last norm's output, with the vocabulary split over the tensor axis.

Training minimises the sum over the valid tokens of the *global* batch divided by their count, so the loss does not
depend on the split into micro-batches. A micro-batch therefore returns a sum, and the engine, which knows the global
count, divides (`zero/engine.py`).

No rank has the logits of the full vocabulary. For each row a rank computes three numbers over its part: the maximum m,
the sum s of exp(logit - m), and the target's logit if the target is in its part. One all-gather of these gives every
rank M = max m, S = sum of s exp(m - M), and the loss log S + M - target's logit.

A rank need not have the logits of all tokens either. With `chunk`, the projection and the loss are computed for so many
tokens at a time. Forward keeps the logits of the last chunk alone; backward begins there, and computes those of each
other chunk again: with n chunks (n - 1) / n of one more product. One chunk is the ordinary loss.

Logits can be scaled, then capped: y = c tanh(x / c). The slope of the cap, 1 - (y / c)^2, cannot be read off the
exponentials that forward leaves, so with a cap backward computes all logits again.
"""

import torch
from torch import Tensor

from megazero.comm.collectives import all_gather
from megazero.comm.regions import Region
from megazero.kernels import reference
from megazero.kernels.operations import Operations
from megazero.model.linear import gathered_products
from megazero.model.tape import Owner, Tape
from megazero.plan.model import Shape


class HeadLoss:
    """The projection to the vocabulary and the loss of each token, as one operation.

    Args:
        owner: has the weight [V, D] of this rank's part of the vocabulary, padding included.
        shape: gives the size of the whole vocabulary, and how logits are scaled and capped.
        chunk: the number of tokens whose logits exist at a time; 0: all.
        ops: the kernels to use.
    """

    def __init__(self, region: Region, owner: Owner, *, shape: Shape, chunk: int, ops: Operations):
        self.region, self.owners, self._chunk, self.ops = region, (owner,), chunk, ops
        self._vocab, self._scale, self._cap = shape.vocab, shape.logit_scale, shape.logit_cap

    def run(
        self, tape: Tape, x_nD: Tensor, targets_N: Tensor, valid_N: Tensor, z_loss: float, greedy: bool = False
    ) -> Tensor:
        """Return -log softmax(logits)[target] in nats, 0 where not valid: [N], fp32 (fp64 for fp64 inputs).

        Args:
            z_loss: adds z_loss * log(sum of exp(logits))^2 (Chowdhery et al. 2022, arXiv 2204.02311, section 5).
            x_nD: the last norm's output; with sequence parallelism, of this rank's part of the tokens.
            targets_N: those of invalid positions may hold anything.
            greedy: return losses, and 1 where the target is the first of the most probable tokens, [2, N].
        """
        weight_VD, region = self.owners[0]["weight"], self.region
        targets_N = torch.where(valid_N, targets_N, 0) - region.axis.rank * len(weight_VD)
        cuts = self._cuts(len(targets_N))
        slots, best = [tape.use(weight_VD) for _ in cuts], list[Tensor]()
        if len(cuts) == 1:
            (logits_MV,) = gathered_products(x_nD, region, [(weight_VD, None)])
            parts_3N = self._parts(logits_MV, targets_N, best=best if greedy else None)
        else:
            x_ND = region.gather(x_nD, "forward").wait()
            logits_MV = x_nD.new_empty(self._chunk, len(weight_VD))
            chunks = ((x_ND[rows], targets_N[rows]) for rows in cuts)
            rows = ((torch.mm(x, weight_VD.T, out=logits_MV[: len(x)]), targets) for x, targets in chunks)
            parts_3N = torch.cat([self._parts(*each, best=best if greedy else None) for each in rows], 1)
        parts_T3N = all_gather(parts_3N[None], region.axis, "loss")
        losses_N, log_sums_N = reference.cross_entropy_merge(parts_T3N)
        if greedy:
            own_TN = all_gather((torch.cat(best) == targets_N)[None].to(losses_N), region.axis, "loss")
            top_N = own_TN.gather(0, parts_T3N[:, 0].argmax(0)[None])[0]
            return torch.stack((losses_N, top_N)).masked_fill_(~valid_N, 0.0)
        kept_MV = logits_MV if self._cap is None else None
        tape.keep((x_nD, slots, targets_N, parts_3N[0], log_sums_N, valid_N, kept_MV, z_loss), weight_VD)
        if z_loss:
            losses_N = losses_N + z_loss * log_sums_N.square()
        return losses_N.masked_fill_(~valid_N, 0.0)

    def back(self, tape: Tape, grads_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of x, and deliver the weight's, one product a chunk."""
        x_nD, slots, targets_N, maxima_N, log_sums_N, valid_N, logits_MV, z_loss = tape.take()
        weight_VD, grads_N = tape.weights.pop(), torch.where(valid_N, grads_N, 0.0)
        gathering = self.region.gather(x_nD, "again")
        grad_ND, x_ND, slope_MV = x_nD.new_empty(len(targets_N), x_nD.shape[1]), None, None
        cuts = self._cuts(len(targets_N))
        if logits_MV is None:
            logits_MV, slope_MV = (x_nD.new_empty(cuts[0].stop, len(weight_VD)) for _ in range(2))
            x_ND = gathering.wait()
        for rows, slot in zip(reversed(cuts), slots, strict=True):
            chunk_MV = logits_MV[: rows.stop - rows.start]
            slopes = () if slope_MV is None else (slope_MV[: len(chunk_MV)],)
            if x_ND is not None:  # not the last chunk, whose logits forward has left
                self._parts(torch.mm(x_ND[rows], weight_VD.T, out=chunk_MV), targets_N[rows], *slopes)
            each = (maxima_N, log_sums_N, targets_N, grads_N)
            maxima_M, log_sums_M, targets_M, grads_M = (values_N[rows] for values_N in each)
            more_M = 2 * z_loss * log_sums_M * grads_M if z_loss else None
            factor_M = grads_M if more_M is None else grads_M + more_M
            self.ops.cross_entropy_backward_(chunk_MV, maxima_M, log_sums_M, targets_M, factor_M)
            if more_M is not None:  # the target's -1 does not have the factor
                _add_at(chunk_MV, targets_M, more_M)
            for factor in (*slopes, *((self._scale,) if self._scale != 1 else ())):
                chunk_MV *= factor
            torch.mm(chunk_MV, weight_VD, out=grad_ND[rows])
            if rows.start == 0:  # the sum overlaps with the weight's gradient
                summing = self.region.sum(grad_ND, "backward")
            if x_ND is None:
                x_ND = gathering.wait()
            slot.add_product(chunk_MV.T, x_ND[rows])
        return summing.wait(), None, None, None, None

    def _cuts(self, tokens: int) -> list[slice]:
        """Cut the tokens into chunks, in order; only the last one may be shorter."""
        chunk = self._chunk or tokens
        return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]

    def shaped(self, logits_MV: Tensor, slope_MV: Tensor | None = None) -> Tensor:
        """Scale and cap logits in place, and return them; write the slope of the cap to `slope_MV` if given."""
        if self._scale != 1:
            logits_MV *= self._scale
        if self._cap is not None:
            logits_MV.div_(self._cap).tanh_()
            if slope_MV is not None:
                torch.square(logits_MV, out=slope_MV).neg_().add_(1)
            return logits_MV * self._cap if torch.is_grad_enabled() else logits_MV.mul_(self._cap)
        return logits_MV

    def _parts(
        self,
        logits_MV: Tensor,
        targets_M: Tensor,
        slope_MV: Tensor | None = None,
        best: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the statistics of some rows, [3, M]; see `reference.cross_entropy_parts_`. Overwrites the logits.

        Args:
            slope_MV: receives the slope of the cap.
            best: receives the index of each row's first maximum.
        """
        self.shaped(logits_MV, slope_MV)
        first = self.region.axis.rank * logits_MV.shape[1]
        logits_MV[:, max(self._vocab - first, 0) :] = -torch.inf  # padding
        if best is not None:
            best.append(logits_MV.argmax(1))
        return self.ops.cross_entropy_parts_(logits_MV, targets_M)


def _add_at(logits_MV: Tensor, targets_M: Tensor, values_M: Tensor) -> None:
    """Add a value to each row at its target, if the target is in this rank's part of the vocabulary."""
    absent = (targets_M < 0) | (targets_M >= logits_MV.shape[1])
    values = values_M.masked_fill(absent, 0.0).to(logits_MV.dtype)
    logits_MV.scatter_add_(1, targets_M.masked_fill(absent, 0)[:, None], values[:, None])
