"""Split the rows of embedding tables over the ranks: row-wise ZeRO.

Of a table of R rows on N ranks each rank has the rows [k R/N, (k+1) R/N), with what the optimizer keeps of them, and is
their only owner: nothing is gathered or reduced whole. A look-up of a batch:

    ids        the distinct rows that this rank's samples ask for, each sent to its owner
    values     come back, D numbers for each, and the module's own look-up runs on them
    gradients  of the same rows go to the owners in backward, D numbers for each

So memory is R D / N and traffic is proportional to the rows of a batch. Owners keep what has come until the step, sum
it over ranks and micro-batches in that order, and update only the rows that were touched (`row_optimizers.py`). The
gradients of tables are part of the global norm.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.comm.rows import exchange_counts, exchange_rows
from megazero.kernels import counter
from megazero.library.adopt import from_first
from megazero.library.row_optimizers import RowOptimizer

_PIECE = 1 << 20  # elements of a table that are made, sent or read at a time
Table = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True)
class _Arrived:
    """Gradients that have come to their owner: of its rows, counted from its first."""

    rows: Tensor
    gradients: Tensor


@dataclass(eq=False)
class RowShard:
    """The rows of one table that this rank owns.

    Args:
        name: of the table's parameter.
        whole: rows of the whole table.
        first: the first row that this rank owns.
        values: its rows [n, D].
        state: what the optimizer keeps of them, by name.
        trained: whether they are updated.

    Attributes:
        arrived: gradients of this step.
        open: a backward runs.
        step: the number of updates so far.
    """

    name: str
    whole: int
    first: int
    values: Tensor
    state: dict[str, Tensor]
    world: Axis
    trained: bool
    arrived: list[_Arrived] = field(default_factory=list)
    open: bool = False
    step: int = 0

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distinct rows among `ids`, their values, and for each id its place among them.

        Every rank calls it. Raises UserError 511: an id is no row.
        """
        distinct, places = torch.unique(ids, return_inverse=True)
        odd = [int(distinct[end]) for end in (0, -1) if len(distinct) and not 0 <= int(distinct[end]) < self.whole]
        each = self.world.shard(self.whole)
        ends = torch.arange(1, self.world.size + 1, device=ids.device) * each
        starts = torch.searchsorted(distinct, torch.cat([ends.new_zeros(1), ends])).tolist()
        own = [stop - start for start, stop in pairwise(starts)]
        said = exchange_counts([*own, int(bool(odd)), zlib.crc32(self.name.encode())], self.world, ids.device)
        if odd:
            raise UserError(511, f"{self.name}: row {odd[0]} of a table of {self.whole:,} rows", rank=self.world.rank)
        for rank, of_rank in enumerate(said):  # all ranks know, and stop
            if of_rank[-2]:
                raise FailedElsewhere(rank, 511)
            if of_rank[-1] != said[0][-1]:
                raise UserError(507, f"it looks up in another table than rank 0 in {self.name}", rank=rank)
        counts = [of_rank[:-2] for of_rank in said]
        asked = exchange_rows(distinct, counts, self.world, "row ids") - self.first
        back = [list(column) for column in zip(*counts, strict=True)]
        wants = torch.is_grad_enabled() and self.trained
        values = _LookUp.apply(self, asked, counts, back, _anchor(self.values) if wants else None)
        return distinct, values, places

    def pieces(self) -> Iterator[slice]:
        """Yield the rows of the whole table in pieces that are sent at a time."""
        step = max(_PIECE // self.values.shape[1], 1)
        yield from (slice(start, min(start + step, self.whole)) for start in range(0, self.whole, step))

    def own(self, piece: slice) -> tuple[slice, slice]:
        """Return this rank's rows of a piece: counted in the piece, and among its own rows."""
        low = min(max(piece.start, self.first), piece.stop)
        high = max(min(piece.stop, self.first + len(self.values)), low)
        return slice(low - piece.start, high - piece.start), slice(low - self.first, high - self.first)

    def take(self, whole: Tensor | None) -> None:
        """Take the rows of a whole table that rank 0 has. Every rank calls it."""
        for piece in self.pieces():
            rows = self.values.new_zeros((piece.stop - piece.start, self.values.shape[1]))
            if self.world.rank == 0:
                assert whole is not None, "rank 0 has it"
                rows.copy_(whole.detach()[piece])
            from_first(rows, self.world)
            there, here = self.own(piece)
            self.values[here] = rows[there]

    def gathered(self, *, wanted: bool) -> Tensor | None:
        """Return the whole table in host memory, None where it is not wanted. Every rank calls it."""
        whole = torch.empty((self.whole, self.values.shape[1]), dtype=self.values.dtype) if wanted else None
        for piece in self.pieces():
            rows = self.values.new_zeros((piece.stop - piece.start, self.values.shape[1]))
            there, here = self.own(piece)
            rows[there] = self.values[here]
            all_reduce(rows, self.world, "rows")
            if whole is not None:
                whole[piece] = rows.cpu()
        return whole

    def squares(self) -> Tensor:
        """Return the sum of squares of this rank's gradients of the step, fp64; sums them by row first."""
        summed = self._summed()
        self.arrived = [summed]
        return summed.gradients.to(torch.float64).square().sum()

    def _summed(self) -> _Arrived:
        """Return the rows that a step has touched, each once, with their gradients."""
        if not self.arrived:
            return _Arrived(torch.empty(0, dtype=torch.int64, device=self.values.device), self.values[:0])
        rows = torch.cat([one.rows for one in self.arrived])
        touched, places = torch.unique(rows, return_inverse=True)
        total = self.values.new_zeros((len(touched), self.values.shape[1]))
        total.index_add_(0, places, torch.cat([one.gradients for one in self.arrived]))
        return _Arrived(touched, total)


class _LookUp(torch.autograd.Function):
    """Fetch rows from their owners; in backward their gradients go there."""

    @staticmethod
    def forward(ctx: Any, table: RowShard, asked: Tensor, counts: Any, back: Any, anchor: Tensor | None) -> Tensor:
        ctx.table, ctx.asked, ctx.counts, ctx.step = table, asked, counts, table.step
        return exchange_rows(table.values[asked], back, table.world, "row values")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        if not ctx.table.open or ctx.step != ctx.table.step:
            what = f"{ctx.table.name}: gradients outside of sharded.backward, or of an earlier step"
            raise UserError(506, what, "call sharded.backward(loss) between two steps")
        (gradient,) = gradients
        arrived = exchange_rows(gradient.contiguous(), ctx.counts, ctx.table.world, "row gradients")
        ctx.table.arrived.append(_Arrived(ctx.asked, arrived))
        return (None,) * 5


def _anchor(like: Tensor) -> Tensor:
    return torch.zeros((), requires_grad=True, device=like.device)


class Tables:
    """All tables of a module whose rows are split.

    Args:
        optimizer: of all.
    """

    def __init__(self, shards: Sequence[RowShard], optimizer: RowOptimizer, world: Axis):
        self.shards, self._optimizer, self._world = shards, optimizer, world

    def squares(self) -> Tensor | None:
        """Return the sum of squares of the gradients of all tables over all ranks; None: there are no tables."""
        if not self.shards:
            return None
        own = torch.stack([shard.squares() for shard in self.shards]).sum()
        return all_reduce(own, self._world, "norm")

    def update(self, lr: float | None, scale: Tensor, step: int, *, skipped: bool) -> None:
        """Update the touched rows with gradients multiplied by `scale`, and forget them.

        Args:
            lr: None: the optimizer's own.
        """
        for shard in self.shards:
            if shard.trained and not skipped:
                (one,) = shard.arrived  # `squares` has summed them
                gradients = one.gradients * scale.to(one.gradients.dtype)
                rate = self._optimizer.lr if lr is None else lr
                self._optimizer.update(shard.values, shard.state, one.rows, gradients, rate, step)
            shard.arrived.clear()
            shard.step += 1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Be around a backward: gradients may come."""
        for shard in self.shards:
            shard.open = True
        try:
            yield
        finally:
            for shard in self.shards:
                shard.open = False

    def forget(self) -> None:
        """Forget the gradients of this step."""
        for shard in self.shards:
            shard.arrived.clear()


def split_rows(
    name: str,
    table: Table,
    optimizer: RowOptimizer,
    world: Axis,
    device: torch.device,
    computes: torch.dtype | None = None,
) -> RowShard:
    """Split a table's rows over the ranks; its module looks up in them from then on. Every rank calls it.

    Values are those of rank 0, a piece at a time; of a table on meta normal ones, a function of name and row.

    Args:
        computes: the dtype of what is looked up; None: that of the rows.

    Raises:
        UserError: 511, the table renorms rows, or scales gradients by frequency.
    """
    if table.max_norm is not None or table.scale_grad_by_freq:
        raise UserError(511, f"{name}: max_norm and scale_grad_by_freq need the whole table", "leave them out")
    whole, width = table.weight.shape
    each = world.shard(whole)
    first, last = min(world.rank * each, whole), min((world.rank + 1) * each, whole)
    values = torch.empty((last - first, width), dtype=table.weight.dtype, device=device)
    shard = RowShard(name, whole, first, values, {}, world, table.weight.requires_grad)
    if table.weight.is_meta:
        _draw(shard, table.padding_idx)
    else:
        shard.take(table.weight)
    if shard.trained:
        shard.state = optimizer.state(values)
    world.comm.ledger.hold("parameters", values.nbytes)
    world.comm.ledger.hold("optimizer", sum(state.nbytes for state in shard.state.values()))
    table.weight = nn.Parameter(values, requires_grad=False)
    table.forward = _forward(table, shard, computes)  # type: ignore[method-assign]
    return shard


def _draw(shard: RowShard, padding: int | None) -> None:
    """Write initial values, normal as those of torch's tables; they depend on name and row alone."""
    flat, start = shard.values.view(-1), shard.first * shard.values.shape[1]
    for at in range(0, len(flat), _PIECE):
        stop = min(at + _PIECE, len(flat))
        flat[at:stop] = counter.normal(0, shard.name, start + at, start + stop)
    if padding is not None and shard.first <= padding < shard.first + len(shard.values):
        shard.values[padding - shard.first] = 0.0


def _forward(table: Table, shard: RowShard, computes: torch.dtype | None) -> Callable[..., Tensor]:
    """Return the forward of a table whose rows are split."""

    def found(ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        distinct, values, places = shard.look_up(ids.reshape(-1))
        padding = None if table.padding_idx is None else (distinct == table.padding_idx).nonzero().flatten().tolist()
        return places.view(ids.shape), values.to(computes or values.dtype), padding[0] if padding else None

    def embedding(ids: Tensor) -> Tensor:
        places, values, padding = found(ids)
        return functional.embedding(places, values, padding)

    def bag(ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        assert isinstance(table, nn.EmbeddingBag)
        places, values, padding = found(ids)
        told = {"mode": table.mode, "include_last_offset": table.include_last_offset, "padding_idx": padding}
        return functional.embedding_bag(places, values, offsets, per_sample_weights=per_sample_weights, **told)

    return embedding if isinstance(table, nn.Embedding) else bag
