"""Split the rows of embedding tables over the ranks: row-wise ZeRO.

Each rank owns an interval of a table's rows, with their optimizer state; whole tables are never gathered or reduced. A
look-up gets the rows of a batch from their owners, and sends the owners the gradients of those rows in backward
(`row_groups.py`). So a rank's memory is R D / N, for R rows of D numbers on N ranks, and traffic is proportional to the
rows of a batch. The gradients of tables are part of the global norm.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from megazero.base.errors import UserError
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.library.calls import Calls
from megazero.library.row_groups import RowGroup, RowShard
from megazero.library.row_optimizers import RowOptimizer

Table = nn.Embedding | nn.EmbeddingBag


class Tables:
    """All tables of a module whose rows are split, in groups of one width and dtype.

    Args:
        shards: this rank's rows of all tables.
        places: the group of each table and its index there, by the name of the table's module.

    Attributes:
        groups: the groups of all tables.
        trained: whether any of them is trained.
    """

    def __init__(self, shards: Sequence[RowShard], places: Mapping[str, tuple[RowGroup, int]], world: Axis):
        self.shards, self._places, self._world = shards, places, world
        self.groups = list(dict.fromkeys(group for group, _ in places.values()))
        self.trained = any(group.trained for group in self.groups)

    def fetch(self, ids: Mapping[str, Tensor]) -> None:
        """Look up rows of several tables at once; the next look-up in each returns them. Every rank calls it.

        Args:
            ids: the ids for each table, by the name of its module.

        Raises:
            UserError: 511, there is no such table, or an id is no row; 507, ranks look up in different tables.
        """
        if odd := next((name for name in ids if name not in self._places), None):
            raise UserError(511, f"prefetch_rows: {odd} is not a table with split rows", "name it in tables=")
        for group in self.groups:
            if asked := {self._places[name][1]: one for name, one in ids.items() if self._places[name][0] is group}:
                group.fetch(asked)

    def squares(self) -> Tensor | None:
        """Return the sum of squares of the gradients of all tables over all ranks; None: there are no tables."""
        if not self.groups:
            return None
        return all_reduce(torch.stack([group.squares() for group in self.groups]).sum(), self._world, "norm")


def split_rows(
    tables: Mapping[str, Table], optimizer: RowOptimizer, world: Axis, calls: Calls, computes: torch.dtype | None = None
) -> Tables:
    """Split the rows of tables over the ranks, and make their modules look up split rows. Every rank calls it.

    Values are those of rank 0, sent in pieces; a table on meta gets normal values that depend on name and row alone.

    Args:
        tables: the tables, by the names of their modules.
        computes: the dtype of looked-up values; None: that of the rows.

    Raises:
        UserError: 511, a table has max_norm, or scales gradients by frequency.
    """
    alike: dict[tuple[int, torch.dtype, bool], list[str]] = {}
    for name, table in tables.items():
        if table.max_norm is not None or table.scale_grad_by_freq:
            raise UserError(511, f"{name}: max_norm and scale_grad_by_freq need the whole table", "leave them out")
        weight = table.weight
        alike.setdefault((weight.shape[1], weight.dtype, weight.requires_grad), []).append(name)
    shards = {name: RowShard(f"{name}.weight", len(table.weight), world) for name, table in tables.items()}
    places: dict[str, tuple[RowGroup, int]] = {}
    for (width, dtype, trained), names in alike.items():
        like = torch.empty((0, width), dtype=dtype, device=calls.values.device)
        group = RowGroup([shards[name] for name in names], like, optimizer, calls, trained=trained)
        places |= {name: (group, number) for number, name in enumerate(names)}
        for number, name in enumerate(names):
            table, shard = tables[name], shards[name]
            if table.weight.is_meta:
                shard.draw(table.padding_idx)
            else:
                shard.take(table.weight)
            table.weight = shard.weight
            if trained:
                shard.weight.register_post_accumulate_grad_hook(lambda _, name=shard.name: _refuse(name))
            table.forward = _forward(table, group, number, computes)  # type: ignore[method-assign]
        world.comm.ledger.hold("parameters", group.rows.nbytes)
        world.comm.ledger.hold("optimizer", sum(state.nbytes for state in group.state.values()))
    return Tables(list(shards.values()), places, world)


def _refuse(name: str) -> None:
    do = "look its rows up; the whole table is in sharded.full_state_dict()"
    raise UserError(506, f"{name} has only this rank's rows, and was used outside of a look-up", do)


def _forward(table: Table, group: RowGroup, number: int, computes: torch.dtype | None) -> Callable[..., Tensor]:
    """Return the forward of table `number` of a group; `computes`: see `split_rows`."""

    def found(ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        rows, values, places = group.look_up(number, ids)
        padding = None if table.padding_idx is None else (rows == table.padding_idx).nonzero().flatten().tolist()
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
