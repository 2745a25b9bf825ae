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
"""

import torch
from torch import Tensor

from megazero.comm.collectives import all_gather
from megazero.comm.regions import Region
from megazero.kernels import reference
from megazero.kernels.operations import Operations
from megazero.model.linear import gathered_products
from megazero.model.tape import Owner, Tape


class HeadLoss:
    """The projection to the vocabulary and the loss of each token, as one operation.

    Args:
        owner: has the weight [V, D] of this rank's part of the vocabulary, padding included.
        vocab: size of the whole vocabulary; logits beyond it are padding.
        chunk: the number of tokens whose logits exist at a time; 0: all.
        ops: the kernels to use.
    """

    def __init__(self, region: Region, owner: Owner, *, vocab: int, chunk: int, ops: Operations):
        self.region, self.owners, self._chunk, self.ops = region, (owner,), chunk, ops
        self._vocab = vocab

    def run(self, tape: Tape, x_nD: Tensor, targets_N: Tensor, valid_N: Tensor) -> Tensor:
        """Return -log softmax(logits)[target] in nats, 0 where not valid: [N], fp32 (fp64 for fp64 inputs).

        Args:
            x_nD: the last norm's output; with sequence parallelism, of this rank's part of the tokens.
            targets_N: those of invalid positions may hold anything.
        """
        weight_VD, region = self.owners[0]["weight"], self.region
        targets_N = torch.where(valid_N, targets_N, 0) - region.axis.rank * len(weight_VD)
        cuts = self._cuts(len(targets_N))
        slots = [tape.use(weight_VD) for _ in cuts]
        if len(cuts) == 1:
            (logits_MV,) = gathered_products(x_nD, region, [(weight_VD, None)])
            parts_3N = self._parts(logits_MV, targets_N)
        else:
            x_ND = region.gather(x_nD, "forward").wait()
            logits_MV = x_nD.new_empty(self._chunk, len(weight_VD))
            chunks = ((x_ND[rows], targets_N[rows]) for rows in cuts)
            parts_3N = torch.cat([self._parts(_product(x, weight_VD, logits_MV), targets) for x, targets in chunks], 1)
        losses_N, log_sums_N = reference.cross_entropy_merge(all_gather(parts_3N[None], region.axis, "loss"))
        tape.keep((x_nD, slots, targets_N, parts_3N[0], log_sums_N, valid_N, logits_MV), weight_VD)
        return losses_N.masked_fill_(~valid_N, 0.0)

    def back(self, tape: Tape, grads_N: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x, and deliver the weight's, one product a chunk."""
        x_nD, slots, targets_N, maxima_N, log_sums_N, valid_N, logits_MV = tape.take()
        weight_VD, grads_N = tape.weights.pop(), torch.where(valid_N, grads_N, 0.0)
        gathering = self.region.gather(x_nD, "again")
        grad_ND, x_ND = x_nD.new_empty(len(targets_N), x_nD.shape[1]), None
        for rows, slot in zip(reversed(self._cuts(len(targets_N))), slots, strict=True):
            chunk_MV = logits_MV[: rows.stop - rows.start]
            if x_ND is not None:  # not the last chunk, whose logits forward has left
                self._parts(_product(x_ND[rows], weight_VD, logits_MV), targets_N[rows])
            each = (each_N[rows] for each_N in (maxima_N, log_sums_N, targets_N, grads_N))
            self.ops.cross_entropy_backward_(chunk_MV, *each)
            torch.mm(chunk_MV, weight_VD, out=grad_ND[rows])
            if rows.start == 0:  # the sum overlaps with the weight's gradient
                summing = self.region.sum(grad_ND, "backward")
            if x_ND is None:
                x_ND = gathering.wait()
            slot.add_product(chunk_MV.T, x_ND[rows])
        return summing.wait(), None, None

    def _cuts(self, tokens: int) -> list[slice]:
        """Cut the tokens into chunks, in order; only the last one may be shorter."""
        chunk = self._chunk or tokens
        return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]

    def _parts(self, logits_MV: Tensor, targets_M: Tensor) -> Tensor:
        """Return the statistics of some rows, [3, M]; see `reference.cross_entropy_parts_`. Overwrites the logits."""
        first = self.region.axis.rank * logits_MV.shape[1]
        logits_MV[:, max(self._vocab - first, 0) :] = -torch.inf  # padding
        return self.ops.cross_entropy_parts_(logits_MV, targets_M)


def _product(x_MD: Tensor, weight_VD: Tensor, into: Tensor) -> Tensor:
    """Return x weight^T in the first rows of `into`."""
    return torch.mm(x_MD, weight_VD.T, out=into[: len(x_MD)])
