"""One transformer block: the unit of sharding, recomputation, pipeline stages and profiling.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

A block is a `Layer` (`contract.py`), independent of its neighbours and its caller. The part before the core of
attention is one autograd function, the part after it another (`tape.py`).

Shapes: S sequence, B batch, D hidden; n rows of this rank's part of the residual stream, N of the whole sequence.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.model.attention import Attention, Rotary
from megazero.model.batch_context import BatchContext
from megazero.model.dropout import Dropout
from megazero.model.linear import ColumnProducts, RowProduct
from megazero.model.mlp import Mlp
from megazero.model.norm import Norm
from megazero.model.tape import Tape, apply
from megazero.plan.model import Shape


class Block(nn.Module):
    """A block of a transformer.

    Args:
        layer: the block's index, from 0; dropout masks depend on it.
        rotary: None with learned positions.
        seed: of dropout masks.
    """

    def __init__(self, shape: Shape, layer: int, rotary: Rotary | None, *, seed: int, region: Region, ops: Operations):
        super().__init__()
        self.attention_norm = Norm(shape.norm, shape.hidden, shape.norm_eps, ops)
        self.attention = Attention(shape, rotary=rotary, region=region, ops=ops)
        self.mlp_norm = Norm(shape.norm, shape.hidden, shape.norm_eps, ops)
        self.mlp = Mlp(shape, region=region, ops=ops)
        dropouts = [Dropout(shape.dropout, seed=seed, layer=layer, site=site, ops=ops) for site in (0, 1)]
        self.attention_dropout, self.mlp_dropout = dropouts
        self._before = _BeforeCore(self.attention_norm, self.attention.qkv.product)
        self._behind = _BehindCore(self.attention.out.product, self.mlp_norm, self.mlp, dropouts)

    def forward(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return the output of the block, [S, B, D]."""
        qkv, residual_SBD = apply(self._before, x_SBD)
        return apply(self._behind, self.attention.core(qkv, step), residual_SBD, step)


class _BeforeCore:
    """The part before the core of attention: return the projection of norm(x), and x itself as the residual stream.

    x is passed through so that the norm's backward adds its two gradients, from the norm and from the residual stream.
    """

    def __init__(self, norm: Norm, qkv: ColumnProducts):
        self._norm, self._qkv, self.owners = norm, qkv, (*norm.owners, *qkv.owners)

    def run(self, tape: Tape, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        (qkv_NP,) = self._qkv.run(tape, self._norm.run(tape, _rows(x_SBD)))
        return _shaped(qkv_NP, x_SBD), x_SBD.view_as(x_SBD)

    def back(self, tape: Tape, grad: Tensor, grad_SBD: Tensor) -> Tensor:
        normed = self._qkv.back(tape, grad.reshape(-1, grad.shape[-1]))
        return _shaped(self._norm.back_of_sum(tape, normed, _rows(grad_SBD)), grad_SBD)


class _BehindCore:
    """The part after the core of attention: from the heads' output and the residual stream to the block's output."""

    def __init__(self, out: RowProduct, norm: Norm, mlp: Mlp, dropouts: Sequence[Dropout]):
        self._out, self._norm, self._mlp = out, norm, mlp
        self._first, self._second = dropouts
        self.owners = (*out.owners, *norm.owners, *mlp.owners)

    def run(self, tape: Tape, attended: Tensor, x_SBD: Tensor, step: BatchContext) -> Tensor:
        y_nD = self._out.run(tape, attended.reshape(-1, attended.shape[-1]))
        if self._first.acts(step):
            total_nD = _rows(self._first.added(_shaped(y_nD, x_SBD), x_SBD, step))
            y_nD = self._norm.run(tape, total_nD)
        else:  # compute the sum and its norm in one pass
            total_nD, y_nD = self._norm.run_of_sum(tape, y_nD, _rows(x_SBD))
        y_nD = self._mlp.run(tape, y_nD, skip_output=step.recomputing)
        tape.keep((step,))
        if step.recomputing:
            return x_SBD.new_zeros(()).expand(x_SBD.shape)
        if self._second.acts(step):
            return self._second.added(_shaped(y_nD, x_SBD), _shaped(total_nD, x_SBD), step)
        return _shaped(total_nD + y_nD, x_SBD)

    def back(self, tape: Tape, grad_SBD: Tensor) -> tuple[Tensor, Tensor, None]:
        (step,) = tape.take()
        grad_nD = _rows(grad_SBD)
        drops = self._second.acts(step)  # no name holds the masked gradient, so it is freed after the MLP's backward
        grad = self._mlp.back(tape, _rows(self._second.masked(grad_SBD, step)) if drops else grad_nD)
        grad = grad_x = self._norm.back_of_sum(tape, grad, grad_nD)
        if self._first.acts(step):
            grad = _rows(self._first.masked(_shaped(grad_x, grad_SBD), step))
        return _shaped(self._out.back(tape, grad), grad_SBD), _shaped(grad_x, grad_SBD), None


def _rows(x: Tensor) -> Tensor:
    """Return x as a contiguous matrix of its rows."""
    return x.contiguous().view(-1, x.shape[-1])


def _shaped(rows: Tensor, like_SBD: Tensor) -> Tensor:
    """Return rows [S B, C] as [S, B, C]; S may count a part of the sequence or all of it."""
    return rows.view(-1, like_SBD.shape[1], rows.shape[-1])
