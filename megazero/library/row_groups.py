"""Look up rows of tables that are split over ranks, and update them: all tables of one width and dtype together.

Rank k of N owns the rows [k R/N, (k+1) R/N) of a table of R rows; no other rank has them. A rank keeps its rows of all
tables of a group in one buffer, one table after the other, with the optimizer's state in the same order. So a look-up
in all of them takes each of these exchanges once, and one call updates all:

    ids        the distinct rows that this rank's samples need, each sent to its owner as its place in that buffer
    values     come back, D numbers for each
    gradients  of the same rows go to the owners in backward, D numbers for each

Owners keep the received gradients until the step, sum them over ranks and micro-batches in that order, and update only
the touched rows (`row_optimizers.py`).
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.comm.rows import Counts, exchange_counts, exchange_rows
from megazero.kernels import counter
from megazero.library.adopt import from_first
from megazero.library.calls import Calls
from megazero.library.row_optimizers import RowOptimizer

PIECE = 1 << 20  # elements of a table that are made, sent or read at a time


@dataclass(eq=False)
class RowShard:
    """The rows of one table that this rank owns.

    Args:
        name: the name of the table's parameter.
        whole: the number of rows of the whole table.

    Attributes:
        values: the rows that this rank owns [n, D], a view of the group's rows.
        state: the optimizer's state of these rows, by name.
        weight: the parameter of the table's module, which replaces the whole one; it may be frozen.
    """

    name: str
    whole: int
    world: Axis
    values: Tensor = field(init=False)
    state: dict[str, Tensor] = field(init=False)
    weight: nn.Parameter = field(init=False)

    def owned(self, rank: int) -> range:
        """Return the rows that a rank owns; the last ranks have fewer."""
        each = self.world.shard(self.whole)
        first = min(rank * each, self.whole)
        return range(first, min(first + each, self.whole))

    @property
    def first(self) -> int:
        """Return the first row that this rank owns."""
        return self.owned(self.world.rank).start

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the whole table."""
        return self.whole, self.values.shape[1]

    def draw(self, padding: int | None) -> None:
        """Write normal values, as torch's embeddings have, which depend only on name and row; row `padding` is zero."""
        flat, start = self.values.view(-1), self.first * self.values.shape[1]
        for at in range(0, len(flat), PIECE):
            stop = min(at + PIECE, len(flat))
            flat[at:stop] = counter.normal(0, self.name, start + at, start + stop)
        if padding is not None and self.first <= padding < self.first + len(self.values):
            self.values[padding - self.first] = 0.0

    def _pieces(self) -> Iterator[tuple[slice, Tensor, slice, slice]]:
        """Yield the whole table in pieces, one for each operation that sends rows.

        Yields:
            (rows of the piece, new zeros for them, this rank's rows as a slice of the piece, and as one of `values`).
        """
        size = max(PIECE // self.values.shape[1], 1)
        for start in range(0, self.whole, size):
            stop = min(start + size, self.whole)
            low = min(max(start, self.first), stop)
            high = max(min(stop, self.first + len(self.values)), low)
            rows = self.values.new_zeros((stop - start, self.values.shape[1]))
            yield slice(start, stop), rows, slice(low - start, high - start), slice(low - self.first, high - self.first)

    def take(self, whole: Tensor | None) -> None:
        """Take this rank's rows from `whole` of rank 0; that of other ranks is not read. Every rank calls it."""
        for piece, rows, there, here in self._pieces():
            if self.world.rank == 0:
                assert whole is not None, "rank 0 has it"
                rows.copy_(whole.detach()[piece])
            self.values[here] = from_first(rows, self.world)[there]

    def gathered(self, *, wanted: bool) -> Tensor | None:
        """Return the whole table in host memory, or None if it is not wanted. Every rank calls it."""
        whole = torch.empty(self.shape, dtype=self.values.dtype) if wanted else None
        for piece, rows, there, here in self._pieces():
            rows[there] = self.values[here]
            all_reduce(rows, self.world, "rows")
            if whole is not None:
                whole[piece] = rows.cpu()
        return whole


# The result of a look-up in one table: distinct rows [n], their values [n, D], and the index there of each id.
Found = tuple[Tensor, Tensor, Tensor]


class RowGroup:
    """Tables of one width and dtype, whose rows are split over the ranks.

    Args:
        like: [0, D], with the dtype and the device of the rows.
        trained: whether rows are updated.
        calls: the calls of the module's parts, which know whether a backward runs.

    Attributes:
        rows: this rank's rows of all tables [n, D].
        state: the optimizer's state of these rows, by name.
    """

    def __init__(
        self, tables: Sequence[RowShard], like: Tensor, optimizer: RowOptimizer, calls: Calls, *, trained: bool
    ):
        self._world, device = tables[0].world, like.device
        begins = [[0, *accumulate(len(table.owned(k)) for table in tables)] for k in range(self._world.size)]
        own = begins[self._world.rank]
        self.rows = like.new_empty((own[-1], like.shape[1]))
        self.state = optimizer.state(self.rows) if trained else {}
        for table, first, stop in zip(tables, own, own[1:], strict=False):
            table.values = self.rows[first:stop]
            table.state = {name: values[first:stop] for name, values in self.state.items()}
            table.weight = nn.Parameter(table.values, requires_grad=trained)
        self.tables, self.trained, self._optimizer, self._calls = tables, trained, optimizer, calls
        self._wholes = torch.tensor([table.whole for table in tables], device=device)
        self._eaches = torch.tensor([max(len(table.owned(0)), 1) for table in tables], device=device)
        self._begins = torch.tensor([of_rank[:-1] for of_rank in begins], device=device)  # [rank, table]
        self._keys = self._wholes.cumsum(0) - self._wholes  # the key of each table's row 0
        self._arrived: list[tuple[Tensor, Tensor]] = []  # places of rows, and the gradients received for them
        self._fetched: dict[int, tuple[Tensor, Found]] = {}

    def fetch(self, asked: Mapping[int, Tensor]) -> None:
        """Look up the ids given by table index; `look_up` with the same ids returns their rows. Every rank calls it.

        Raises:
            UserError: 511, an id is no row; 507, ranks look up in different tables.
        """
        self._fetched.clear()
        for live in (True, False):  # all tables of a look-up get gradients, or none
            if of_these := {table: asked[table] for table in sorted(asked) if self._is_live(table) is live}:
                self._look_up(of_these)

    def look_up(self, table: int, ids: Tensor) -> Found:
        """Look up rows of one table, given by its index. Every rank calls it, unless the rows were fetched.

        Raises:
            UserError: as `fetch`; 511, other ids were fetched.
        """
        if table not in self._fetched:
            self._look_up({table: ids})
        fetched, found = self._fetched.pop(table)
        if not (fetched is ids or torch.equal(fetched, ids)):
            what = f"{self.tables[table].name}: looks up other ids than were given to prefetch_rows"
            raise UserError(511, what, "give prefetch_rows the ids of the forward that follows")
        return found

    def _look_up(self, asked: Mapping[int, Tensor]) -> None:
        """Look up rows of tables, given in ascending order, for `look_up` to return.

        A row's key is its number among the rows of all tables, so sorted keys are grouped by table; before they are
        sent, they are sorted by owner.
        """
        device, world, tables = self.rows.device, self._world, list(asked)
        ids = [of_table.reshape(-1) for of_table in asked.values()]
        lengths = torch.tensor([len(one) for one in ids], device=device)
        of_id = torch.tensor(tables, device=device).repeat_interleave(lengths)
        wanted = torch.cat([one.long() for one in ids])
        wrong = (wanted < 0) | (wanted >= self._wholes[of_id])
        keys, places = torch.unique(wanted.where(~wrong, 0) + self._keys[of_id], return_inverse=True)
        of_key = torch.searchsorted(self._keys, keys, right=True) - 1
        rows = keys - self._keys[of_key]
        owners = rows // self._eaches[of_key]
        here = rows - owners * self._eaches[of_key] + self._begins[owners, of_key]
        by_owner = torch.argsort(owners, stable=True)
        found, own = of_key.bincount(minlength=len(self.tables)), owners.bincount(minlength=world.size)
        *found, odd = torch.cat([found[tables], own, wrong.any()[None]]).tolist()
        each, own = found[: len(tables)], found[len(tables) :]
        asks = ", ".join(self.tables[table].name for table in tables)
        said = exchange_counts([*own, odd, zlib.crc32(asks.encode())], world, device)
        if odd:
            at = int(wrong.nonzero()[0])
            table = self.tables[int(of_id[at])]
            what = f"{table.name}: row {int(wanted[at])} does not exist in a table of {table.whole:,} rows"
            raise UserError(511, what, rank=world.rank)
        for rank, (*_, theirs, names) in enumerate(said):  # all ranks get the error, and stop
            if theirs:
                raise FailedElsewhere(rank, 511)
            if names != said[0][-1]:
                raise UserError(507, f"looked up other tables than rank 0; rank {world.rank}: {asks}", rank=rank)
        counts = [of_rank[: world.size] for of_rank in said]
        sought = exchange_rows(here[by_owner], counts, world, "row ids")
        self._calls.follow()
        wants = torch.is_grad_enabled() and self._is_live(tables[0])
        anchor = torch.zeros((), requires_grad=True, device=device) if wants else None
        values = _LookUp.apply(self, sought, by_owner, each, counts, anchor)
        places = places.split([len(one) for one in ids])
        of_tables = zip(tables, rows.split(each), values, places, accumulate(each, initial=0), strict=False)
        for table, distinct, one, at, first in of_tables:
            self._fetched[table] = asked[table], (distinct, one, at - first)

    def _is_live(self, table: int) -> bool:
        """Return whether a table's rows are trained. Raises UserError 502: it was unfrozen after it was sharded."""
        live = self.tables[table].weight.requires_grad
        if live and not self.trained:
            what = f"{self.tables[table].name} requires a gradient, but was frozen when it was sharded"
            raise UserError(502, what, "freeze it only after megazero.shard, which then makes its optimizer state")
        return live

    def take_gradients(self, epoch: int, asked: Tensor, gradients: Tensor, counts: Counts) -> None:
        """Send gradients to the owners of their rows, and keep those received; drop them if only other modules train.

        `epoch` is that of the look-up; `gradients` are sorted by owner, and `counts` has their numbers [from][to]; the
        received ones are of the rows `asked`, which are indices in `rows`.

        Raises:
            UserError: 506, no backward runs, or the rows were looked up before the last update.
        """
        calls = self._calls
        if not calls.values.process.in_backward or epoch != calls.values.epoch:
            what = f"{self.tables[0].name}: gradients outside of sharded.backward, or of an earlier step"
            raise UserError(506, what, "call sharded.backward(loss) between two steps")
        if calls.in_backward and calls.trains:
            gradients = gradients if calls.factor is None else gradients * calls.factor
            self._arrived.append((asked, exchange_rows(gradients, counts, self._world, "row gradients")))

    def squares(self) -> Tensor:
        """Sum the gradients of this rank's rows, by row, for `update`; return the sum of their squares, fp64."""
        none = torch.empty(0, dtype=torch.int64, device=self.rows.device), self.rows[:0]
        rows, gradients = zip(none, *self._arrived, strict=True)
        touched, places = torch.unique(torch.cat(rows), return_inverse=True)
        total = self.rows.new_zeros((len(touched), self.rows.shape[1])).index_add_(0, places, torch.cat(gradients))
        self._arrived = [(touched, total)]
        return total.to(torch.float64).square().sum()

    def update(self, lr: float | None, scale: Tensor, step: int, *, skipped: bool) -> None:
        """Update the touched rows with the gradients that `squares` has summed, times `scale`; drop the gradients.

        Args:
            lr: the learning rate; None: the optimizer's own.
        """
        if self.trained and not skipped:
            ((touched, gradients),) = self._arrived  # `squares` has summed them
            rate = self._optimizer.lr if lr is None else lr
            gradients = gradients * scale.to(gradients.dtype)
            self._optimizer.update(self.rows, self.state, touched, gradients, rate, step)
        self.forget()

    def forget(self) -> None:
        """Drop the gradients of this step, and the fetched rows."""
        self._arrived.clear()
        self._fetched.clear()


class _LookUp(torch.autograd.Function):
    """Fetch rows of several tables from their owners; send the owners their gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any, group: RowGroup, asked: Tensor, by_owner: Tensor, each: list[int], counts: Counts, anchor: Any
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.asked, ctx.by_owner, ctx.counts = group, asked, by_owner, counts
        ctx.epoch = group._calls.values.epoch  # rows looked up in an earlier epoch are stale
        back = [list(column) for column in zip(*counts, strict=True)]  # from the owners
        came = exchange_rows(group.rows[asked], back, group._world, "row values")
        return torch.empty_like(came).index_copy_(0, by_owner, came).split(each)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.group.take_gradients(ctx.epoch, ctx.asked, torch.cat(gradients)[ctx.by_owner], ctx.counts)
        return (None,) * 6
