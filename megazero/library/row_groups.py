"""Look up in tables whose rows are split, and update them: all tables of one width and dtype together.

Of a table of R rows on N ranks each rank has the rows [k R/N, (k+1) R/N), and is their only owner. The rows that a rank
owns of all tables of a group lie in one buffer, one table after the other, with the optimizer's state next to
it; so a look-up in all of them is three exchanges, and one update:

    ids        the distinct rows that this rank's samples ask for, each sent to its owner as its place in that buffer
    values     come back, D numbers for each
    gradients  of the same rows go to the owners in backward, D numbers for each

Owners keep what has come until the step, sum it over ranks and micro-batches in that order, and update only the rows
that were touched (`row_optimizers.py`).
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
        name: of the table's parameter.
        whole: rows of the whole table.

    Attributes:
        values: the rows that this rank owns [n, D], a part of the group's.
        state: what the optimizer keeps of them, by name.
        weight: the parameter that the table has in place of the whole one; it may be frozen.
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
        """Write initial values, normal as those of torch's tables; they depend on name and row alone."""
        flat, start = self.values.view(-1), self.first * self.values.shape[1]
        for at in range(0, len(flat), PIECE):
            stop = min(at + PIECE, len(flat))
            flat[at:stop] = counter.normal(0, self.name, start + at, start + stop)
        if padding is not None and self.first <= padding < self.first + len(self.values):
            self.values[padding - self.first] = 0.0

    def _pieces(self) -> Iterator[tuple[slice, Tensor, slice, slice]]:
        """Yield the whole table in pieces that are sent at a time.

        Yields:
            (its rows, new zeros for them, this rank's own rows counted in the piece, and among its own rows).
        """
        size = max(PIECE // self.values.shape[1], 1)
        for start in range(0, self.whole, size):
            stop = min(start + size, self.whole)
            low = min(max(start, self.first), stop)
            high = max(min(stop, self.first + len(self.values)), low)
            rows = self.values.new_zeros((stop - start, self.values.shape[1]))
            yield slice(start, stop), rows, slice(low - start, high - start), slice(low - self.first, high - self.first)

    def take(self, whole: Tensor | None) -> None:
        """Take the rows of a whole table that rank 0 has. Every rank calls it."""
        for piece, rows, there, here in self._pieces():
            if self.world.rank == 0:
                assert whole is not None, "rank 0 has it"
                rows.copy_(whole.detach()[piece])
            self.values[here] = from_first(rows, self.world)[there]

    def gathered(self, *, wanted: bool) -> Tensor | None:
        """Return the whole table in host memory, None where it is not wanted. Every rank calls it."""
        whole = torch.empty(self.shape, dtype=self.values.dtype) if wanted else None
        for piece, rows, there, here in self._pieces():
            rows[there] = self.values[here]
            all_reduce(rows, self.world, "rows")
            if whole is not None:
                whole[piece] = rows.cpu()
        return whole


# Rows that a look-up in one table found: distinct ones, their values [n, D], and of each id the place there.
Found = tuple[Tensor, Tensor, Tensor]


class RowGroup:
    """Tables of one width and dtype, whose rows are split over the ranks.

    Args:
        like: [0, D], of the dtype and on the device of the rows.
        trained: whether rows are updated.
        calls: of the module's parts, which know the backward that runs.

    Attributes:
        rows: those that this rank owns, of all tables [n, D].
        state: what the optimizer keeps of them, by name.
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
        self._arrived: list[tuple[Tensor, Tensor]] = []  # places of rows, and the gradients that have come for them
        self._fetched: dict[int, tuple[Tensor, Found]] = {}

    def fetch(self, asked: Mapping[int, Tensor]) -> None:
        """Look up in several tables at once; `look_up` with the same ids returns what was found. Every rank calls it.

        Raises:
            UserError: 511, an id is no row; 507, other ranks ask other tables.
        """
        self._fetched.clear()
        for live in (True, False):  # gradients come for all tables of a look-up, or for none
            if of_these := {table: asked[table] for table in sorted(asked) if self._is_live(table) is live}:
                self._look_up(of_these)

    def look_up(self, table: int, ids: Tensor) -> Found:
        """Look up in one table. Every rank calls it, unless what it asks for was fetched.

        Raises:
            UserError: as `fetch`; 511, other ids were fetched.
        """
        if table not in self._fetched:
            self._look_up({table: ids})
        fetched, found = self._fetched.pop(table)
        if not (fetched is ids or torch.equal(fetched, ids)):
            what = f"{self.tables[table].name}: looks up other ids than prefetch_rows got"
            raise UserError(511, what, "give prefetch_rows the ids of the forward that follows")
        return found

    def _look_up(self, asked: Mapping[int, Tensor]) -> None:
        """Look up in tables of ascending number.

        A row's key is its number among the rows of all tables, so the distinct keys are sorted by table; to be sent
        they are sorted by owner.
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
            what = f"{table.name}: row {int(wanted[at])} of a table of {table.whole:,} rows"
            raise UserError(511, what, rank=world.rank)
        for rank, (*_, theirs, names) in enumerate(said):  # all ranks know, and stop
            if theirs:
                raise FailedElsewhere(rank, 511)
            if names != said[0][-1]:
                raise UserError(507, f"it looks up in other tables than rank 0 in {asks}", rank=rank)
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
        """Return whether rows of a table are to be updated. Raises UserError 502: it was frozen when it was sharded."""
        live = self.tables[table].weight.requires_grad
        if live and not self.trained:
            what = f"{self.tables[table].name} requires a gradient, and was frozen when it was sharded"
            raise UserError(502, what, "freeze it after megazero.shard, which then has memory for its state")
        return live

    def take_gradients(self, epoch: int, asked: Tensor, gradients: Tensor, counts: Counts) -> None:
        """Send gradients to the owners of their rows, and keep those that come; drop them if others are trained.

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
        """Return the sum of squares of this rank's gradients of the step, fp64; sums them by row first."""
        none = torch.empty(0, dtype=torch.int64, device=self.rows.device), self.rows[:0]
        rows, gradients = zip(none, *self._arrived, strict=True)
        touched, places = torch.unique(torch.cat(rows), return_inverse=True)
        total = self.rows.new_zeros((len(touched), self.rows.shape[1])).index_add_(0, places, torch.cat(gradients))
        self._arrived = [(touched, total)]
        return total.to(torch.float64).square().sum()

    def update(self, lr: float | None, scale: Tensor, step: int, *, skipped: bool) -> None:
        """Update the touched rows with gradients multiplied by `scale`, and forget them.

        Args:
            lr: None: the optimizer's own.
        """
        if self.trained and not skipped:
            ((touched, gradients),) = self._arrived  # `squares` has summed them
            rate = self._optimizer.lr if lr is None else lr
            gradients = gradients * scale.to(gradients.dtype)
            self._optimizer.update(self.rows, self.state, touched, gradients, rate, step)
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of this step, and what was fetched."""
        self._arrived.clear()
        self._fetched.clear()


class _LookUp(torch.autograd.Function):
    """Fetch rows of several tables from their owners; in backward their gradients go there."""

    @staticmethod
    def forward(
        ctx: Any, group: RowGroup, asked: Tensor, by_owner: Tensor, each: list[int], counts: Counts, anchor: Any
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.asked, ctx.by_owner, ctx.counts = group, asked, by_owner, counts
        ctx.epoch = group._calls.values.epoch  # rows that were looked up in an earlier one are stale
        back = [list(column) for column in zip(*counts, strict=True)]  # from the owners
        came = exchange_rows(group.rows[asked], back, group._world, "row values")
        return torch.empty_like(came).index_copy_(0, by_owner, came).split(each)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.group.take_gradients(ctx.epoch, ctx.asked, torch.cat(gradients)[ctx.by_owner], ctx.counts)
        return (None,) * 6
