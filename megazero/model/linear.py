"""Linear layers that compute and deliver their weight's gradient themselves.

Shapes: N rows (sequence x batch), n rows of this rank's part of the residual stream (N, or N / t with sequence
parallelism), I inputs, O outputs of this rank.

    column   weight_OI   y_NO = gather(x_nI) weight^T + bias    the tensor axis splits O: a rank computes some outputs
    row      weight_IO   y_nO = sum(x_NI weight) + bias         the tensor axis splits I: a rank computes a partial sum

Both keep the split dimension first. A column product leads into a tensor-parallel region, a row product out of it
(`comm/regions.py` has `gather` and `sum`). The backward of each is two products: dx for the layer below, and the
weight's gradient, which goes straight into the parameter's gradient slot. A column product's dx must be summed over the
tensor axis; the sum is under way while the weight's gradient is computed. With sequence parallelism only a rank's own
part of x is kept for the backward, and gathered again while dx is computed (Korthikanti et al. 2022, section 4.2.2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.model.parameter import declare
from megazero.model.tape import Owner, Tape


class ColumnProducts:
    """Several products of one input, which is gathered and whose gradient is summed once for all of them.

    Args:
        owners: of each weight [O, I] and bias [O].
    """

    def __init__(self, region: Region, *owners: Owner):
        self._region, self.owners, self._alone = region, owners, region.axis.size == 1

    def run(self, tape: Tape, x_nI: Tensor) -> tuple[Tensor, ...]:
        """Return gather(x) weight^T + bias, [N, O], of each."""
        x_NI = x_nI if self._alone else self._region.gather(x_nI, "forward").wait()
        slots, weights, products = [], [], []
        for owner in self.owners:
            weight, bias = owner["weight"], owner.get("bias")
            slots.append((tape.use(weight), tape.use(bias)))
            weights.append(weight)
            products.append(F.linear(x_NI, weight, bias))
        tape.keep((x_nI, slots), *weights)
        return tuple(products)

    def back(self, tape: Tape, *grads_NO: Tensor) -> Tensor:
        """Return the gradient of x."""
        x_nI, slots = tape.take()
        weights = [tape.weights.pop() for _ in grads_NO]
        gathering = None if self._alone else self._region.gather(x_nI, "again")
        grad_x = torch.mm(grads_NO[0], weights.pop())
        for grad_NO in grads_NO[1:]:
            grad_x.addmm_(grad_NO, weights.pop())
        summing = None if self._alone else self._region.sum(grad_x, "backward")
        x_NI = x_nI if gathering is None else gathering.wait()
        for grad_NO, (weight_slot, bias_slot) in zip(grads_NO, slots, strict=True):
            weight_slot.add_product(grad_NO.T, x_NI)
            if bias_slot is not None:
                bias_slot.add_sum(grad_NO)
        return grad_x if summing is None else summing.wait()


class RowProduct:
    """A product whose input is split over the tensor axis.

    Args:
        owner: of the weight [I, O] and the bias [O].
    """

    def __init__(self, region: Region, owner: Owner):
        self._region, self.owners, self._alone = region, (owner,), region.axis.size == 1

    def run(self, tape: Tape, x_NI: Tensor, *, skip_output: bool = False) -> Tensor:
        """Return sum(x weight) + bias, [n, O].

        Args:
            skip_output: nobody looks at the result, only at its backward: it is not computed, and nothing is sent.
        """
        (owner,) = self.owners
        weight_IO, bias_O = owner["weight"], owner.get("bias")
        tape.keep((x_NI, tape.use(weight_IO), tape.use(bias_O)), weight_IO)
        axis = self._region.axis
        if skip_output:
            rows = len(x_NI) // (axis.size if self._region.sequence else 1)
            return x_NI.new_zeros(()).expand(rows, weight_IO.shape[1])
        # The first rank's partial sum brings the bias along, which costs no pass over the sum.
        partial = torch.mm(x_NI, weight_IO) if bias_O is None or axis.rank else torch.addmm(bias_O, x_NI, weight_IO)
        return partial if self._alone else self._region.sum(partial, "forward").wait()

    def back(self, tape: Tape, grad_nO: Tensor) -> Tensor:
        """Return the gradient of x, for a contiguous one of the result."""
        x_NI, weight_slot, bias_slot = tape.take()
        gathering = None if self._alone else self._region.gather(grad_nO, "backward")
        if bias_slot is not None:
            bias_slot.add_sum(grad_nO)
        grad_NO = grad_nO if gathering is None else gathering.wait()
        grad_x = F.linear(grad_NO, tape.weights.pop())
        weight_slot.add_product(x_NI.T, grad_NO)
        return grad_x


class ColumnLinear(nn.Module):
    """A linear layer whose outputs are split over the tensor axis: weight [outputs, inputs], bias [outputs]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float, region: Region):
        super().__init__()
        self.weight = declare((outputs, inputs), std=std, decay=True, axis=region.axis)
        self.bias = declare((outputs,), axis=region.axis) if bias else None
        self.product = ColumnProducts(region, self._parameters)


class RowLinear(nn.Module):
    """A linear layer whose inputs are split over the tensor axis: weight [inputs, outputs].

    The bias [outputs] is whole on every rank.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float, region: Region):
        super().__init__()
        self.weight = declare((inputs, outputs), std=std, decay=True, axis=region.axis)
        self.bias = declare((outputs,)) if bias else None
        self.product = RowProduct(region, self._parameters)
