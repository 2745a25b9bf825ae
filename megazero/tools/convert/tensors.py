"""Convert tensors of transformers to our parameters and back, by a family's table of rows.

A row links names of ours to names of transformers, `{i}` a block's number and `{part}` weight or bias, with a way to
convert their tensors. Ours: row weights (out, down) are [in, out], column weights [out, in]; the rows of qkv are
grouped by key-value head: for each group its query heads, its key, its value. Theirs: [out, in], but GPT-2's Conv1D.

Channels that turn together stand d / 2 apart in our heads. A head of transformers that turns neighbours
(interleaved), or a share of its channels, has its channels in another order, `Heads.order`. Attention sums over
channels, so the order of queries and keys may change together: the model computes the same function.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.model.parameter import declaration_of
from megazero.model.transformer import Transformer
from megazero.plan.model import Shape


class Heads(NamedTuple):
    """The numbers that determine the rows of qkv.

    Attributes:
        per_group: query heads for each key-value head.
        order: for each of our channels of a head, its number in transformers.
    """

    per_group: int
    kv_heads: int
    head_dim: int
    order: tuple[int, ...]

    def ours(self, x: Tensor) -> Tensor:
        """Return rows [heads d, ...] with the channels of each head in our order."""
        return self._ordered(x, self.order)

    def theirs(self, x: Tensor) -> Tensor:
        """Return rows in transformers' order: the inverse of `ours`."""
        return self._ordered(x, sorted(range(self.head_dim), key=self.order.__getitem__))

    def _ordered(self, x: Tensor, order: Sequence[int]) -> Tensor:
        return x.unflatten(0, (-1, self.head_dim))[:, list(order)].flatten(0, 1)

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Join three projections [heads d, ...] of transformers to one of ours."""
        parts = (x.unflatten(0, (self.kv_heads, -1)) for x in (self.ours(q), self.ours(k), v))
        return torch.cat(tuple(parts), dim=1).flatten(0, 1)

    def apart(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split our rows to queries, keys and values of transformers: the inverse of `grouped`."""
        groups = rows.unflatten(0, (self.kv_heads, -1))
        parts = groups.split([self.per_group * self.head_dim, self.head_dim, self.head_dim], dim=1)
        q, k, v = (part.flatten(0, 1) for part in parts)
        return self.theirs(q), self.theirs(k), v

    @property
    def rows(self) -> tuple[int, int, int]:
        """Return the numbers of rows of all queries, keys and values."""
        each = self.kv_heads * self.head_dim
        return self.per_group * each, each, each


def heads_of(shape: Shape, *, interleaved: bool) -> Heads:
    """Return the rows of a model's heads, with their order in a family."""
    size, rope = shape.head_dim, next((kind.rope for kind in shape.kinds if shape.rope_of(kind)), None)
    turning = int(size * rope.share) if rope else size
    rows = list(range(size))
    if interleaved:
        rows[:turning] = [*range(0, turning, 2), *range(1, turning, 2)]
    first, second, rest = rows[: turning // 2], rows[turning // 2 : turning], rows[turning:]
    order = (*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :])
    return Heads(shape.heads // shape.kv_heads, shape.kv_heads, size, order)


class Way(NamedTuple):
    """A conversion, in both directions, between parameters of ours and the transformers tensors that make them."""

    to_ours: Callable[[Heads, Sequence[Tensor]], Sequence[Tensor]]
    to_theirs: Callable[[Heads, Sequence[Tensor]], Sequence[Tensor]]


SAME = Way(lambda heads, theirs: theirs, lambda heads, ours: ours)
WAYS = {
    "turned": Way(lambda heads, theirs: (theirs[0].t(),), lambda heads, ours: (ours[0].t(),)),
    "ordered": Way(lambda heads, theirs: (heads.ours(theirs[0]),), lambda heads, ours: (heads.theirs(ours[0]),)),
    "qkv": Way(lambda heads, theirs: (heads.grouped(*theirs),), lambda heads, ours: heads.apart(ours[0])),
    "joined_qkv": Way(
        lambda heads, theirs: (heads.grouped(*theirs[0].split(heads.rows)),),
        lambda heads, ours: (torch.cat(heads.apart(ours[0])),),
    ),
    "conv1d_qkv": Way(
        lambda heads, theirs: (heads.grouped(*theirs[0].t().split(heads.rows)),),  # t() leaves a bias as it is
        lambda heads, ours: (torch.cat(heads.apart(ours[0])).t(),),
    ),
    "grouped_qkv": Way(  # for each head its query, key and value, as ours
        lambda heads, theirs: (heads.grouped(*heads._replace(order=tuple(range(heads.head_dim))).apart(theirs[0])),),
        lambda heads, ours: (heads._replace(order=tuple(range(heads.head_dim))).grouped(*heads.apart(ours[0])),),
    ),
    "gate_up": Way(lambda heads, theirs: theirs[0].chunk(2), lambda heads, ours: (torch.cat(tuple(ours)),)),
}

Rows = dict[str, tuple[str, Way]]  # our names -> (theirs, the way); several names are separated by spaces


@dataclass(frozen=True)
class Link:
    """Parameters of ours, the transformers tensors that make them, and the conversions."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_ours: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    to_theirs: Callable[[Sequence[Tensor]], Sequence[Tensor]]


def links(rows: Rows, heads: Heads, layers: int, parameters: Collection[str]) -> list[Link]:
    """Return the links of those of a family's rows whose parameters a model has."""
    return [link for row in rows.items() for link in _links(row, heads, layers) if {*link.ours} <= {*parameters}]


def _links(row: tuple[str, tuple[str, Way]], heads: Heads, layers: int) -> Iterator[Link]:
    ours, (theirs, way) = row
    for i in range(layers) if "{i}" in ours else (0,):
        for part in ("weight", "bias") if "{part}" in ours else ("",):
            own, other = (tuple(each.format(i=i, part=part).split()) for each in (ours, theirs))
            yield Link(own, other, partial(way.to_ours, heads), partial(way.to_theirs, heads))


def filled(
    model: Transformer, take: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device | None = None
) -> Transformer:
    """Give a model on the meta device its weights, in a dtype; return it.

    Args:
        take: returns a whole weight, once; a rank of the tensor axis keeps its rows of it.
    """
    for name, parameter in dict(model.named_parameters()).items():
        declared = declaration_of(parameter)
        rows = take(name)[declared.first_row :][: declared.local_shape[0]].to(device, dtype)
        if len(rows) < declared.local_shape[0]:  # padding of the vocabulary
            rows = torch.cat((rows, rows.new_zeros((declared.local_shape[0] - len(rows), *rows.shape[1:]))))
        made = nn.Parameter(rows)
        made.declaration = declared  # type: ignore[attr-defined]
        torch.utils.swap_tensors(parameter, made)
    return model
