"""One transformer block: the unit of sharding, recomputation, pipeline stages and profiling.

    serial            x = x + attention(norm(x))                      Radford et al. 2019 (GPT-2)
                      x = x + mlp(norm(x))
    parallel          x = x + attention(norm(x)) + mlp(norm'(x))      Wang and Komatsuzaki 2021 (GPT-J)
    parallel_shared   as parallel, with one norm for both branches

`norm_place` puts the norms of a serial block before each branch (pre), after it (post, as in OLMo 2), or both
(sandwich, as in Gemma 2). A branch is multiplied by `residual_scale` and passes dropout before it is added.

A block is a `Layer` (`contract.py`), independent of its neighbours and its caller. The part before the core of
attention is one autograd function, the part after it another (`tape.py`).

Shapes: S sequence, B batch, D hidden; n rows of this rank's part of the residual stream, N of the whole sequence.
"""

from functools import partial

from torch import Tensor, nn

from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.model.attention import Attention
from megazero.model.batch_context import BatchContext
from megazero.model.dropout import Dropout
from megazero.model.linear import ColumnProducts, RowProducts
from megazero.model.mlp import Mlp
from megazero.model.norm import Norm
from megazero.model.rotary import Rotary
from megazero.model.tape import Tape, apply
from megazero.plan.model import Shape


class Block(nn.Module):
    """A block of a transformer.

    Args:
        layer: the block's index, from 0; dropout masks depend on it.
        rotary: None in a block without rotary positions.
        seed: of dropout masks.
    """

    def __init__(self, shape: Shape, layer: int, rotary: Rotary | None, *, seed: int, region: Region, ops: Operations):
        super().__init__()
        norm = partial(Norm, shape, shape.hidden, ops)
        before, after = shape.norm_place != "post", shape.norm_place != "pre"
        shared = shape.residual == "parallel_shared"
        self.attention_norm = norm() if before else None
        self.attention = Attention(shape, shape.kind(layer), rotary=rotary, region=region, ops=ops)
        self.attention_post_norm = norm() if after else None
        self.mlp_norm = norm() if before and not shared else None
        self.mlp = Mlp(shape, region=region, ops=ops)
        self.mlp_post_norm = norm() if after else None
        dropouts = [Dropout(shape.dropout, seed=seed, layer=layer, site=site, ops=ops) for site in (0, 1)]
        self.attention_dropout, self.mlp_dropout = dropouts
        joins = [_Join(dropout, shape.residual_scale) for dropout in dropouts]
        out, down = self.attention.out.owner, self.mlp.down.owner
        self._before = _BeforeCore(self.attention_norm, self.attention.projection, shared=shared)
        if shape.residual == "serial":
            first = _End(RowProducts(region, out), self.attention_post_norm, joins[0])
            second = _End(RowProducts(region, down), self.mlp_post_norm, joins[1])
            self._after = _Serial(first, self.mlp_norm, self.mlp, second)
        else:
            self._after = _Parallel(self.mlp_norm, self.mlp, _End(RowProducts(region, out, down), None, joins[0]))

    def forward(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return the output of the block, [S, B, D]."""
        qkv, *streams = apply(self._before, x_SBD)
        return apply(self._after, self.attention.core(qkv, step), step, *streams)


class _BeforeCore:
    """The part before the core of attention: return the projection of norm(x), and x itself as the residual stream.

    x is passed through so that the norm's backward adds its two gradients, from the norm and from the residual stream.

    Args:
        shared: the MLP uses norm(x) too: return it as the third result.
    """

    def __init__(self, norm: Norm | None, qkv: ColumnProducts, *, shared: bool):
        self._norm, self._qkv, self._shared = norm, qkv, shared
        self.owners = (*qkv.owners, *(norm.owners if norm is not None else ()))

    def run(self, tape: Tape, x_SBD: Tensor) -> tuple[Tensor, ...]:
        x_nD = _rows(x_SBD)
        normed_nD = x_nD if self._norm is None else self._norm.run(tape, x_nD)
        (qkv_NP,) = self._qkv.run(tape, normed_nD)
        found = _shaped(qkv_NP, x_SBD), x_SBD.view_as(x_SBD)
        return (*found, _shaped(normed_nD, x_SBD)) if self._shared else found

    def back(self, tape: Tape, grad: Tensor, grad_SBD: Tensor, *grads_normed: Tensor) -> Tensor:
        grad_nD = self._qkv.back(tape, grad.reshape(-1, grad.shape[-1]))
        for each in grads_normed:
            grad_nD += _rows(each)
        rows_nD = _rows(grad_SBD)
        grad_nD = grad_nD.add_(rows_nD) if self._norm is None else self._norm.back_of_sum(tape, grad_nD, rows_nD)
        return _shaped(grad_nD, grad_SBD)


class _Join:
    """The addition of a branch to the residual stream: residual + scale dropout(branch)."""

    def __init__(self, dropout: Dropout, scale: float):
        self._dropout, self._scale = dropout, scale

    def is_plain(self, step: BatchContext) -> bool:
        """Return True for a plain sum."""
        return self._scale == 1 and not self._dropout.acts(step)

    def run(self, y_nD: Tensor, residual_nD: Tensor, like_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return the sum, [S, B, D]."""
        if self._scale != 1:
            y_nD = y_nD * self._scale
        if not self._dropout.acts(step):
            return _shaped(residual_nD + y_nD, like_SBD)
        return self._dropout.added(_shaped(y_nD, like_SBD), _shaped(residual_nD, like_SBD), step)

    def back(self, grad_nD: Tensor, like_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return the gradient of the branch, [n, D], from that of the sum, which is also the residual's."""
        if self._dropout.acts(step):
            grad_nD = _rows(self._dropout.masked(_shaped(grad_nD, like_SBD), step))
        return grad_nD if self._scale == 1 else grad_nD * self._scale


class _End:
    """The end of a branch: products back to the residual stream, a norm if the block has one there, and the sum."""

    def __init__(self, products: RowProducts, norm: Norm | None, join: _Join):
        self._products, self._norm, self.join = products, norm, join
        self.owners = (*products.owners, *(norm.owners if norm is not None else ()))

    def run(self, tape: Tape, *xs: Tensor, skip_output: bool = False) -> Tensor:
        """Return the branch, [n, D]; for `skip_output` see `RowProducts`."""
        y_nD = self._products.run(tape, *xs, skip_output=skip_output and self._norm is None)
        return y_nD if self._norm is None else self._norm.run(tape, y_nD)

    def back(self, tape: Tape, grad_nD: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the products' inputs."""
        return self._products.back(tape, grad_nD if self._norm is None else self._norm.back(tape, grad_nD))


class _Serial:
    """The part after the core of a serial block: from the heads' output and the residual stream to the output."""

    def __init__(self, first: _End, norm: Norm | None, mlp: Mlp, second: _End):
        self._first, self._norm, self._mlp, self._second = first, norm, mlp, second
        self.owners = (*first.owners, *(norm.owners if norm is not None else ()), *mlp.owners, *second.owners)

    def run(self, tape: Tape, attended: Tensor, step: BatchContext, x_SBD: Tensor) -> Tensor:
        y_nD = self._first.run(tape, attended.reshape(-1, attended.shape[-1]))
        if self._norm is not None and self._first.join.is_plain(step):  # compute the sum and its norm in one pass
            total_nD, y_nD = self._norm.run_of_sum(tape, y_nD, _rows(x_SBD))
        else:
            total_nD = _rows(self._first.join.run(y_nD, _rows(x_SBD), x_SBD, step))
            y_nD = total_nD if self._norm is None else self._norm.run(tape, total_nD)
        y_nD = self._second.run(tape, self._mlp.run(tape, y_nD), skip_output=step.recomputing)
        tape.keep((step,))
        if step.recomputing:
            return x_SBD.new_zeros(()).expand(x_SBD.shape)
        return self._second.join.run(y_nD, total_nD, x_SBD, step)

    def back(self, tape: Tape, grad_SBD: Tensor) -> tuple[Tensor, None, Tensor]:
        (step,) = tape.take()
        rows_nD = _rows(grad_SBD)
        grads = [*self._second.back(tape, self._second.join.back(rows_nD, grad_SBD, step))]
        grad_nD = self._mlp.back(tape, grads.pop())  # no name holds this gradient, so that it is freed there
        grad_nD = grad_nD.add_(rows_nD) if self._norm is None else self._norm.back_of_sum(tape, grad_nD, rows_nD)
        (grad_attended,) = self._first.back(tape, self._first.join.back(grad_nD, grad_SBD, step))
        return _shaped(grad_attended, grad_SBD), None, _shaped(grad_nD, grad_SBD)


class _Parallel:
    """The part after the core of a parallel block; one sum over the tensor axis ends both branches."""

    def __init__(self, norm: Norm | None, mlp: Mlp, end: _End):
        self._norm, self._mlp, self._end = norm, mlp, end
        self.owners = (*mlp.owners, *(norm.owners if norm is not None else ()), *end.owners)

    def run(self, tape: Tape, attended: Tensor, step: BatchContext, x_SBD: Tensor, *normed_SBD: Tensor) -> Tensor:
        normed_nD = _rows(normed_SBD[0]) if self._norm is None else self._norm.run(tape, _rows(x_SBD))
        inner = self._mlp.run(tape, normed_nD)
        y_nD = self._end.run(tape, attended.reshape(-1, attended.shape[-1]), inner, skip_output=step.recomputing)
        tape.keep((step,))
        if step.recomputing:
            return x_SBD.new_zeros(()).expand(x_SBD.shape)
        return self._end.join.run(y_nD, _rows(x_SBD), x_SBD, step)

    def back(self, tape: Tape, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        (step,) = tape.take()
        rows_nD = _rows(grad_SBD)
        grads = [*self._end.back(tape, self._end.join.back(rows_nD, grad_SBD, step))]
        grad_nD = self._mlp.back(tape, grads.pop())
        (grad_attended,) = grads
        if self._norm is None:
            return _shaped(grad_attended, grad_SBD), None, grad_SBD, _shaped(grad_nD, grad_SBD)
        grad_nD = self._norm.back_of_sum(tape, grad_nD, rows_nD)
        return _shaped(grad_attended, grad_SBD), None, _shaped(grad_nD, grad_SBD)


def _rows(x: Tensor) -> Tensor:
    """Return x as a contiguous matrix of its rows."""
    return x.contiguous().view(-1, x.shape[-1])


def _shaped(rows: Tensor, like_SBD: Tensor) -> Tensor:
    """Return rows [S B, C] as [S, B, C]; S may count a part of the sequence or all of it."""
    return rows.view(-1, like_SBD.shape[1], rows.shape[-1])
