"""Linear layers that compute and deliver their weight's gradient themselves.

Shapes: N rows (sequence x batch), n rows of this rank's part of the residual stream (N, or N / t with sequence
parallelism), I inputs, O outputs of this rank.

    column   weight_OI   y_NO = gather(x_nI) weight^T + bias    the tensor axis splits O: a rank computes some outputs
    row      weight_IO   y_nO = sum(x_NI weight) + bias         the tensor axis splits I: a rank computes a partial sum

Both store the split dimension first. A column product begins a tensor-parallel region, a row product ends it
(`comm/regions.py` has `gather` and `sum`). The backward of each is two products: dx for the layer below, and the
weight's gradient, written directly into the parameter's gradient slot. A column product's dx must be summed over the
tensor axis; the sum overlaps with the weight's gradient. With sequence parallelism only a rank's own part of x is kept
for backward, and gathered again while dx is computed (Korthikanti et al. 2022, section 4.2.2).

In forward, communication can overlap only with the products themselves. So with several chunks (`Region.chunks`) the
rows n are split: a chunk's sum overlaps with the next chunk's product; with sequence parallelism a chunk's gather
overlaps with the previous chunk's product. Then chunk i has the i-th rows of every rank's part, so that each rank ends
with its own rows in order. Two ranks, two chunks:

    rows of rank 0 : rows of rank 1    0 1 2 3 : 4 5 6 7
    the two chunks                     0 1 : 4 5    2 3 : 6 7
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.model.parameter import declare
from megazero.model.tape import Owner, Tape
from megazero.plan.matrices import Matrix


class ColumnProducts:
    """Several products of one input, with one gather of the input and one sum of its gradient.

    Args:
        owners: one for each product, with its weight [O, I] and bias [O].
    """

    def __init__(self, region: Region, *owners: Owner):
        self.region, self.owners, self._alone = region, owners, region.axis.size == 1

    def run(self, tape: Tape, x_nI: Tensor) -> tuple[Tensor, ...]:
        """Return gather(x) weight^T + bias, [N, O], for each product."""
        pairs = [(owner["weight"], owner.get("bias")) for owner in self.owners]
        slots = [(tape.use(weight), tape.use(bias)) for weight, bias in pairs]
        tape.keep((x_nI, slots), *(weight for weight, _ in pairs))
        if self._alone:
            return tuple([F.linear(x_nI, weight, bias) for weight, bias in pairs])
        return gathered_products(x_nI, self.region, pairs)

    def back(self, tape: Tape, *grads_NO: Tensor) -> Tensor:
        """Return the gradient of x."""
        x_nI, slots = tape.take()
        weights = [tape.weights.pop() for _ in grads_NO]
        gathering = None if self._alone else self.region.gather(x_nI, "again")
        grad_x = torch.mm(grads_NO[0], weights.pop())
        for grad_NO in grads_NO[1:]:
            grad_x.addmm_(grad_NO, weights.pop())
        summing = None if self._alone else self.region.sum(grad_x, "backward")
        x_NI = x_nI if gathering is None else gathering.wait()
        for grad_NO, (weight_slot, bias_slot) in zip(grads_NO, slots, strict=True):
            weight_slot.add_product(grad_NO.T, x_NI)
            if bias_slot is not None:
                bias_slot.add_sum(grad_NO)
        return grad_x if summing is None else summing.wait()


class RowProducts:
    """Products whose inputs are split over the tensor axis, and whose sum is one result, with one sum over the ranks.

    Args:
        owners: one for each product, with its weight [I, O] and bias [O].
    """

    def __init__(self, region: Region, *owners: Owner):
        self.region, self.owners, self._alone = region, owners, region.axis.size == 1

    def run(self, tape: Tape, *xs_NI: Tensor, skip_output: bool = False) -> Tensor:
        """Return sum(x weight + bias), [n, O].

        Args:
            skip_output: only backward is needed: compute and send nothing, and return zeros of the result's shape.
        """
        pairs = [(owner["weight"], owner.get("bias")) for owner in self.owners]
        slots = [(tape.use(weight), tape.use(bias)) for weight, bias in pairs]
        tape.keep((xs_NI, slots), *[weight for weight, _ in pairs])
        axis = self.region.axis
        if skip_output:
            rows = len(xs_NI[0]) // (axis.size if self.region.sequence else 1)
            return xs_NI[0].new_zeros(()).expand(rows, pairs[0][0].shape[1])
        if self._alone:
            return _product(xs_NI[0], *pairs[0]) if len(pairs) == 1 else _products(xs_NI, pairs)
        # The first rank adds the biases to its partial sum, which saves a pass over the sum.
        return _summed_products(xs_NI, self.region, [(weight, None if axis.rank else bias) for weight, bias in pairs])

    def back(self, tape: Tape, grad_nO: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of each x from the contiguous gradient of the result."""
        xs_NI, slots = tape.take()
        gathering = None if self._alone else self.region.gather(grad_nO, "backward")
        for _, bias_slot in slots:
            if bias_slot is not None:
                bias_slot.add_sum(grad_nO)
        grad_NO = grad_nO if gathering is None else gathering.wait()
        grads = []
        for x_NI, (weight_slot, _) in zip(reversed(xs_NI), reversed(slots), strict=True):
            grads.append(F.linear(grad_NO, tape.weights.pop()))
            weight_slot.add_product(x_NI.T, grad_NO)
        return tuple(reversed(grads))


def gathered_products(
    x_nI: Tensor, region: Region, pairs: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, ...]:
    """Return gather(x) weight^T + bias, [N, O], for each pair of weight and bias."""
    cuts = region.cut(len(x_nI))
    if not region.sequence or len(cuts) == 1:
        x_NI = region.gather(x_nI, "forward").wait()
        return tuple(F.linear(x_NI, weight, bias) for weight, bias in pairs)
    ranks = region.axis.size
    found = tuple(x_nI.new_empty(ranks * len(x_nI), len(weight)) for weight, _ in pairs)
    gathering = [region.gather(x_nI[rows], "forward") for rows in cuts]
    for rows, pending in zip(cuts, gathering, strict=True):
        x_tmI = pending.wait().view(ranks, -1, x_nI.shape[1])
        for y_NO, (weight, bias) in zip(found, pairs, strict=True):
            _product(x_tmI, weight.T, bias, y_NO.view(ranks, len(x_nI), -1)[:, rows])
    return found


def _summed_products(xs_NI: Sequence[Tensor], region: Region, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Return the sum over pairs and ranks of x weight + bias, [n, O]."""
    streams = [x.view(region.axis.size, -1, x.shape[1]) if region.sequence else x for x in xs_NI]  # [t, n, I] or [n, I]
    length = streams[0].shape[-2]
    cuts = region.cut(length)
    if len(cuts) == 1:
        return region.sum(_products(xs_NI, pairs), "forward").wait()
    y_nO = xs_NI[0].new_empty(length, pairs[0][0].shape[1])
    summing = []
    for rows in cuts:
        y_mO = y_nO[rows]
        partial = _products([stream[..., rows, :] for stream in streams], pairs, None if region.sequence else y_mO)
        summing.append(region.sum(partial.flatten(0, -2), "forward", y_mO))
    for pending in summing:
        pending.wait()
    return y_nO


def _products(xs: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor | None]], out: Tensor | None = None) -> Tensor:
    """Return the sum over pairs of x weight + bias; for x and `out` see `_product`."""
    found = _product(xs[0], *pairs[0], out)
    for x, (matrix_IO, bias_O) in zip(xs[1:], pairs[1:], strict=True):
        found.addmm_(x, matrix_IO) if x.dim() == 2 else found.baddbmm_(x, matrix_IO.expand(len(x), -1, -1))
        if bias_O is not None:
            found += bias_O
    return found


def _product(x: Tensor, matrix_IO: Tensor, bias_O: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x matrix + bias, in `out` if given; x is [N, I], or a strided view [t, m, I], m rows of each rank."""
    if x.dim() == 2:
        return torch.mm(x, matrix_IO, out=out) if bias_O is None else torch.addmm(bias_O, x, matrix_IO, out=out)
    matrices = matrix_IO.expand(len(x), -1, -1)  # neither this nor x is copied: both are strided views
    return torch.bmm(x, matrices, out=out) if bias_O is None else torch.baddbmm(bias_O, x, matrices, out=out)


class Linear(nn.Module):
    """The weight and the bias of a product, for `ColumnProducts` or, if its inputs come first, for `RowProducts`.

    The tensor axis splits the rows of the weight, so the outputs of a column product and its bias, or the inputs of a
    row product, whose bias is replicated on all ranks.

    Args:
        matrix: the weight.

    Attributes:
        owner: has both, for the products.
    """

    def __init__(self, matrix: Matrix, *, bias: bool, std: float, region: Region):
        super().__init__()
        self.weight = declare((matrix.rows, matrix.columns), std=std, decay=True, axis=region.axis, matrix=matrix)
        outputs, axis = (matrix.columns, None) if matrix.inputs_first else (matrix.rows, region.axis)
        self.bias = declare((outputs,), axis=axis) if bias else None
        self.owner: Owner = self._parameters
