"""RMS norms of queries and keys over all heads, which the tensor axis splits (`model.qk_norm: full`, as in OLMo 2).

A rank has the channels of its own heads. The sums of squares of queries and keys are summed over the ranks together;
backward sums once more. Statistics are in fp32 (fp64 for fp64 inputs).
"""

import torch
from torch import Tensor, nn

from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.kernels.reference import wide_dtype
from megazero.model.parameter import declare
from megazero.model.tape import Owner, Tape
from megazero.plan.model import Shape


class _Weight(nn.Module):
    """The weight of one norm: [channels of all heads]."""

    def __init__(self, size: int, mean: float, axis: Axis):
        super().__init__()
        self.size, self.weight = size, declare((size,), mean=mean, axis=axis)


class SplitNorms:
    """The norms of queries and keys as one operation; `weights` has the modules of their weights."""

    def __init__(self, shape: Shape, axis: Axis):
        self._axis, self._eps, self._offset = axis, shape.norm_eps, shape.norm_offset
        self._narrows_first = shape.norm_cast == "before"
        self.weights = [_Weight(size, 1.0 - shape.norm_offset, axis) for size in (shape.width, shape.kv_width)]
        self.owners: tuple[Owner, ...] = tuple(each._parameters for each in self.weights)

    def run(self, tape: Tape, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return the norms of queries [..., H d] and keys [..., G d]."""
        wide = [x.to(wide_dtype(x.dtype)) for x in xs]
        rrms = self._means([x.square() for x in wide]).add_(self._eps).rsqrt_()
        found = []
        for x, x_wide, each, module in zip(xs, wide, rrms, self.weights, strict=True):
            z = (x_wide * each).to(x.dtype) if self._narrows_first else x_wide * each
            found.append((z * self._factor(module.weight, z)).to(x.dtype))
        slots = [tape.use(module.weight) for module in self.weights]
        tape.keep((xs, rrms, slots), *(module.weight for module in self.weights))
        return tuple(found)

    def back(self, tape: Tape, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients: dx = (g w - z mean(g w z)) / rms, dw = sum(g z)."""
        xs, rrms, slots = tape.take()
        weights = [*reversed([tape.weights.pop() for _ in slots])]
        zs = [x.to(each.dtype) * each for x, each in zip(xs, rrms, strict=True)]
        inner = [grad.to(z.dtype) * self._factor(weight, z) for grad, z, weight in zip(grads, zs, weights, strict=True)]
        means = self._means([h * z for h, z in zip(inner, zs, strict=True)])
        for slot, grad, z in zip(slots, grads, zs, strict=True):
            slot.add((grad.to(z.dtype) * z).flatten(0, -2).sum(0))
        rows = zip(xs, inner, zs, means, rrms, strict=True)
        return tuple((h - z * mean).mul_(each).to(x.dtype) for x, h, z, mean, each in rows)

    def _factor(self, weight: Tensor, like: Tensor) -> Tensor:
        return weight.to(wide_dtype(like.dtype)) + self._offset if self._offset else weight

    def _means(self, terms: list[Tensor]) -> Tensor:
        """Return the means of terms over the channels of all ranks: [2, ..., 1]."""
        sums = torch.stack([each.sum(-1, keepdim=True) for each in terms])
        sizes = sums.new_tensor([module.size for module in self.weights])
        return all_reduce(sums, self._axis, "qk norm") / sizes.view(2, *[1] * (sums.dim() - 1))
