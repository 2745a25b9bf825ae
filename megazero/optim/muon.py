"""Muon: update matrices by their orthogonalised momentum, whole, wherever their elements are (Jordan et al. 2024).

    m <- b m + (1 - b) g      u = b m + (1 - b) g (Nesterov) or m      w <- (1 - lr decay) w - lr s orthogonal(u)

    scale s     rms       0.2 sqrt(max(rows, columns)): the size of AdamW's updates     Liu et al. 2025, 2502.16982
                spectral  sqrt(max(1, outputs / inputs))                                Jordan et al. 2024

Momentum, weights and u have a place in a shard like any optimizer's values. Only `orthogonal` needs a whole matrix: the
parts of u are sent to the matrix's owner, and its result back (`plan/matrices.py`). It is computed in the dtype of
parameters if that is bf16, else in that of the masters; the parts are sent in this dtype. A parameter that is several
matrices, such as queries, keys and values, has one owner, who updates each of them by itself.

The parts of a wave are gathered while the owners compute the wave before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, done, start_all_gather_in_place
from megazero.comm.grid import Axis
from megazero.comm.pool import Scratch
from megazero.comm.rows import start_exchange
from megazero.optim.elements import Flats, Now, Piece, Settings, decay_
from megazero.optim.narrow import Narrow
from megazero.plan.matrices import Item, Matrix, Wave, room, waves_of, workspace
from megazero.plan.optimizers import WHOLE
from megazero.plan.placements import Placement
from megazero.zero.unit import Unit

PURPOSE = "matrices"  # in the ledger
MOMENTUM = "momentum"
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7  # keeps a zero matrix zero


class Muon:
    """The update of all parameters of a rank's units whose group has an optimizer of whole matrices.

    Args:
        units: in the order of their updates.
        pieces: the pieces in which each unit is updated.
        scratch: has memory for whole matrices.
        staging: memory in the dtype of updates for the longest piece.
        narrow: widens and rounds values in 16 bits; None: there are none.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pieces: Mapping[Unit, Sequence[Piece]],
        settings: Settings,
        scratch: Scratch,
        staging: Tensor,
        narrow: Narrow | None = None,
    ):
        self._settings, self._staging, self._narrow = settings, staging, narrow
        items = [list(_items(number, unit)) for number, unit in enumerate(units)]
        self._begins: dict[Unit, int] = {}
        self._waves: list[_Wave] = []
        if not any(items):
            return
        axes, dtype = units[0].axes, dtype_of(units[0])

        def take(name: str, numel: int) -> Tensor:
            return scratch.take(name, PURPOSE, numel, dtype, units[0].device)

        sharded = axes.stage.optimizer is Placement.SHARD
        waves = list(waves_of(items, axes.shard.size, axes.tensor.size, sharded=sharded))
        self._begins = {units[min(item.unit for item in wave.items)]: i for i, wave in enumerate(waves)}
        buffers, longest, shapes = room(waves, axes.shard.rank, axes.tensor.rank)
        self._orthogonal = Orthogonaliser(shapes, settings.iterations, take)
        self._whole = take("whole", longest)
        sets = [[take(f"set {i} {k}", numel) for k, numel in enumerate(each)] for i, each in enumerate(buffers)]
        for number, wave in enumerate(waves):
            self._waves.append(_Wave(wave, sets[number % 2], units, pieces, axes.shard, axes.tensor))
        self._results = {piece: part for wave in self._waves for _, piece, part in wave.pieces}
        self._gathering: dict[int, Pending] = {}

    def gather(self, unit: Unit, now: Now) -> None:
        """Compute the results of a wave, if the unit is its first; start to gather the next wave."""
        number = self._begins.get(unit)
        if number is None:
            return
        for soon in range(number, min(number + 2, len(self._waves))):
            if soon not in self._gathering:
                self._begin(soon, now)
        wave = self._waves[number]
        wave.receive(self._gathering.pop(number))
        for item, parts in wave.own:
            self._compute(item.matrix, parts)
        wave.send_back()

    def _begin(self, number: int, now: Now) -> None:
        """Update the momenta of a wave, and start to send its parts to their owners."""
        wave, beta = self._waves[number], self._settings.momentum
        for unit, piece, into in wave.pieces:
            assert piece.state is not None, "muon's state is in memory"
            (own, *_), reduced = piece.state, unit.resting.reduced_gradients[piece.where]
            (momentum,) = [own] if self._narrow is None else self._narrow.widen([own])
            now.limit_(reduced, piece.group)
            gradients = now.scaled(reduced, piece.group, self._staging)
            momentum.lerp_(gradients, now.keep.to(momentum.dtype) * (1.0 - beta))
            into.copy_(gradients.lerp_(momentum, beta) if self._settings.nesterov else momentum)
            if self._narrow is not None:
                self._narrow.round_(piece, MOMENTUM, momentum, own, piece.step + 1.0)
        self._gathering[number] = wave.send()

    def _compute(self, matrix: Matrix, parts: Sequence[Tensor]) -> None:
        """Replace the parts of one parameter by its update, before the learning rate."""
        whole = torch.cat(list(parts), out=self._whole[: matrix.rows * matrix.columns])
        period, turns = matrix.turns
        rows = whole.view(-1, period, matrix.columns)
        for (start, stop), shape in zip(turns, matrix.shapes, strict=True):
            outputs, inputs = shape[::-1] if matrix.inputs_first else shape
            rms = self._settings.scale == "rms"
            self._orthogonal(rows[:, start:stop], 0.2 * max(shape) ** 0.5 if rms else max(1.0, outputs / inputs) ** 0.5)
        for part, result in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.copy_(result)

    def apply(self, piece: Piece, flats: Flats, now: Now) -> None:
        """Update the masters of a piece by the result of its owner."""
        result, rate = self._results[piece], now.rate(piece.group, flats.masters)
        decay_(flats.masters, rate, piece.group)
        flats.masters.sub_(self._staging[: len(result)].copy_(result).mul_(rate))


class _Wave:
    """A wave on this rank, in the buffers of one set.

    Attributes:
        pieces: each piece with its unit, and its part of the buffer that is sent and receives the result.
        own: the items that this rank owns, each with the parts of it in the order of its elements.
    """

    def __init__(
        self,
        wave: Wave,
        memory: Sequence[Tensor],
        units: Sequence[Unit],
        pieces: Mapping[Unit, Sequence[Piece]],
        shard: Axis,
        tensor: Axis,
    ):
        self._shard, self._tensor, self._wave = shard, tensor, wave
        mine = wave.of_shard(shard.rank)
        need = wave.buffers(shard.rank, tensor.rank)
        self._parts, self._gathered, self._joined, self._whole = (
            buffer[:numel] for buffer, numel in zip(memory, need, strict=True)
        )
        self.pieces: list[tuple[Unit, Piece, Tensor]] = []
        for item, at in _places(wave, shard.rank):
            first, unit = item.held(shard.rank).start - units[item.unit].shard.start, units[item.unit]
            stop = first + item.held(shard.rank).stop - item.held(shard.rank).start
            for piece in pieces[unit]:
                if first <= piece.where.start and piece.where.stop <= stop:
                    begin = at + piece.where.start - first
                    part = self._parts[begin : begin + piece.where.stop - piece.where.start]
                    self.pieces.append((unit, piece, part))
        # The items of this shard rank, one after the other, as far as they need not be joined.
        here, sizes = (
            self._joined if wave.sharded else self._parts[shard.rank * wave.longest :],
            [i.numel for i in mine],
        )
        self._from = here[: sum(sizes)]
        self._items = list(self._from.split(sizes)) if len(here) else []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        found: list[list[Tensor]] = [[item] for item in self._items]
        if wave.sharded:
            places = wave.over_shards.places(shard.rank)
            found = [[self._gathered[part] for part in parts] for parts in places.values()]
            if tensor.size > 1:
                for item, parts in zip(self._items, found, strict=True):
                    self._pairs += zip(item.split([len(part) for part in parts]), parts, strict=True)
        self._across = wave.over_tensor(shard.rank)
        if tensor.size > 1:
            places = self._across.places(tensor.rank)
            self.own = [(mine[k], [self._whole[part] for part in parts]) for k, parts in places.items()]
        else:
            self.own = list(zip(mine, found, strict=True))

    def send(self) -> Pending:
        """Start to send the parts along the shard axis."""
        if not self._wave.sharded:
            return done(self._parts)
        return start_exchange(self._parts, self._wave.over_shards.counts, self._shard, PURPOSE, out=self._gathered)

    def receive(self, gathered: Pending) -> None:
        """Wait for the parts from the shard axis, and exchange those of this shard rank's items on the tensor axis."""
        gathered.wait()
        if self._tensor.size > 1 and self._items:
            for joined, part in self._pairs:
                joined.copy_(part)
            start_exchange(self._from, self._across.counts, self._tensor, PURPOSE, out=self._whole).wait()

    def send_back(self) -> None:
        """Send the results back, along the tensor axis and then along the shard axis."""
        if self._tensor.size > 1 and self._items:
            start_exchange(self._whole, self._across.back, self._tensor, PURPOSE, out=self._from).wait()
            for joined, part in self._pairs:
                part.copy_(joined)
        if self._wave.sharded:
            start_exchange(self._gathered, self._wave.over_shards.back, self._shard, PURPOSE, out=self._parts).wait()
        elif self._shard.size > 1:
            start_all_gather_in_place(self._parts, self._shard, PURPOSE).wait()


def dtype_of(unit: Unit) -> torch.dtype:
    """Return the dtype in which matrices are orthogonalised."""
    narrow = unit.resting.parameters.values.dtype
    return narrow if narrow == torch.bfloat16 else unit.resting.precision.update


def _items(number: int, unit: Unit) -> Iterator[Item]:
    """Yield the parameters of a unit that are updated whole."""
    each = len(unit.masters) if unit.axes.stage.optimizer is Placement.SHARD else None
    for group, where in unit.layout.group_slices(slice(0, unit.numel)):
        for interval in unit.layout.intervals if group.optimizer in WHOLE else ():
            if where.start <= interval.start < where.stop:
                assert interval.matrix is not None, f"{interval.name} is no matrix"
                yield Item(number, interval.start, interval.stop, each, interval.matrix)


def _places(wave: Wave, shard: int) -> Iterator[tuple[Item, int]]:
    """Yield each item with the place of this shard rank's part of it in the buffer of parts."""
    at, last = 0, 0
    for item, owner in zip(wave.items, wave.owners, strict=True):
        rank = owner // wave.tensors
        if not wave.sharded and rank != last:  # each shard rank's results have equal room
            at, last = rank * wave.longest, rank
        yield item, at
        held = item.held(shard)
        at += held.stop - held.start


class Orthogonaliser:
    """Replaces the singular values of matrices by numbers near 1 (Newton-Schulz iteration).

        X <- a X + (b G + c G G) X    G = X X^T    (a, b, c) = (3.4445, -4.7750, 2.0315)

    from X = M / |M|, five times by default. The result is U S V^T, where U and V are those of M and the singular values
    S are between about 0.7 and 1.2. An iteration takes 4 m^2 n + 2 m^3 operations, m the shorter side.

    Args:
        shapes: the rows and columns of all matrices.
        steps: number of iterations.
        take: (name, elements) -> memory.
    """

    def __init__(self, shapes: Iterable[tuple[int, int]], steps: int, take: Callable[[str, int], Tensor]):
        (wide, square), self._steps = workspace(shapes), steps
        self._wide = [take(f"wide {i}", wide) for i in range(2)]
        self._square = [take(f"square {i}", square) for i in range(2)]

    def __call__(self, rows_TRC: Tensor, factor: float) -> None:
        """Replace a matrix by `factor` times its orthogonalised value.

        Args:
            rows_TRC: the matrix of T x R rows and C columns, perhaps a strided view.
        """
        turns, each, columns = rows_TRC.shape
        there = rows_TRC.permute(2, 0, 1) if turns * each > columns else rows_TRC
        m, n = sorted((turns * each, columns))
        x, y = (memory[: m * n].view(m, n) for memory in self._wide)
        gram, polynomial = (memory[: m * m].view(m, m) for memory in self._square)
        x.view(there.shape).copy_(there)
        x.div_(x.norm().clamp(min=_EPS))
        for _ in range(self._steps):
            torch.mm(x, x.T, out=gram)
            torch.addmm(gram, gram, gram, beta=_B, alpha=_C, out=polynomial)
            torch.addmm(x, polynomial, x, beta=_A, out=y)
            x, y = y, x
        there.copy_(x.mul_(factor).view(there.shape))
