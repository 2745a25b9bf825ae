"""LayerNorm and RMSNorm, of one tensor or of a sum, without weight decay; replicated over the tensor axis, or split.

The norm of a sum computes the sum in the same pass. In backward, `back_of_sum` adds the gradient that reaches the
norm's input through the residual stream, also for a plain norm. So neither direction has a pass only for an addition.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.kernels.operations import Operations
from megazero.kernels.reference import wide_dtype
from megazero.model.parameter import declare
from megazero.model.tape import Owner, Tape
from megazero.plan.model import Shape


class Norm(nn.Module):
    """LayerNorm with weight and bias (Ba et al. 2016), or RMSNorm with a weight alone (Zhang and Sennrich 2019).

    Args:
        shape: gives the kind of norm and its options.
        size: number of channels.
        ops: the kernels to use.
        heads: an RMSNorm of queries or keys; of single heads, which the tensor axis splits, or of all.
    """

    def __init__(self, shape: Shape, size: int, ops: Operations, *, heads: bool = False):
        super().__init__()
        self.weight = declare((size,), mean=1.0 - shape.norm_offset, partial=heads and shape.qk_norm == "head")
        centred = shape.layernorm and not heads
        if centred and shape.biased("norm"):
            self.bias = declare((size,))
        self.owners: tuple[Owner, ...] = (self._parameters,)
        name = "layer_norm" if centred else "rms_norm"
        pairs = [(getattr(ops, each), getattr(ops, f"{each}_backward")) for each in (name, f"add_{name}")]
        self._plain, self._of_sum = pairs
        lacks_bias = centred and not shape.biased("norm")
        self._vectors: Callable[[], Iterable[Any]] = self._with_zeros if lacks_bias else self._parameters.values
        self._offset = () if shape.norm_offset == 0 else (float(shape.norm_offset),)
        self._numbers: tuple[float, ...] = (shape.norm_eps, *self._offset)
        if not centred and shape.norm_cast == "after":
            self._numbers = (shape.norm_eps, float(shape.norm_offset), False)

    def run(self, tape: Tape, x: Tensor) -> Tensor:
        """Return the norm of x."""
        x = x.contiguous()
        y, *statistics = self._plain[0](x, *self._vectors(), *self._numbers)
        self._keep(tape, x, statistics)
        return y

    def run_of_sum(self, tape: Tape, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual and its norm, both contiguous."""
        total, y, *statistics = self._of_sum[0](x, residual, *self._vectors(), *self._numbers)
        self._keep(tape, total, statistics)
        return total, y

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x from the gradient of the norm."""
        return self._delivered(tape, self._plain[1], grad.contiguous())

    def back_of_sum(self, tape: Tape, grad: Tensor, grad_total: Tensor) -> Tensor:
        """Return the gradient of the norm's input; all tensors are contiguous.

        Args:
            grad: the gradient of the norm's output.
            grad_total: the gradient that reaches the input through the residual stream.
        """
        return self._delivered(tape, self._of_sum[1], grad, grad_total)

    def _with_zeros(self) -> tuple[Tensor, Tensor]:
        """Return the weight, and zeros for the bias that this LayerNorm lacks."""
        return self.weight, torch.zeros_like(self.weight)

    def _keep(self, tape: Tape, x: Tensor, statistics: Sequence[Tensor]) -> None:
        tape.keep((x, statistics, [tape.use(each) for each in self._parameters.values()]), self.owners[0]["weight"])

    def _delivered(self, tape: Tape, operation: Callable[..., Any], *grads: Tensor) -> Tensor:
        x, statistics, slots = tape.take()
        grad_x, *gradients_D = operation(*grads, x, *statistics, tape.weights.pop(), *self._offset)
        for slot, gradient_D in zip(slots, gradients_D[: len(slots)], strict=True):
            slot.add(gradient_D)
        return grad_x


class _Weight(nn.Module):
    """The weight of one norm: [channels of all heads]."""

    def __init__(self, size: int, mean: float, axis: Axis):
        super().__init__()
        self.size, self.weight = size, declare((size,), mean=mean, axis=axis)


class SplitNorms:
    """RMS norms of queries and keys over all heads, which the tensor axis splits (`model.qk_norm: full`, as in OLMo 2).

    They are one operation; `weights` has the modules of their weights. A rank has the channels of its own heads. The
    sums of squares of queries and keys are summed over the ranks together; backward sums once more. Statistics are in
    fp32 (fp64 for fp64 inputs).
    """

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
