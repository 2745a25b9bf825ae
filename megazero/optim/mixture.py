"""Update the shards of units, the parameters of each group with the optimizer of their group.

Optimizers of elements update a shard piece by piece (`elements.py`); those of whole matrices gather these at their
owners first (`muon.py`). State is on the home of the masters: one flat tensor for each kind of value and each run of
elements with the same optimizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from megazero.comm.pool import Scratch
from megazero.kernels.operations import Operations
from megazero.optim.elements import UPDATES, Flats, Now, Piece, Settings, average_, round_
from megazero.optim.muon import Muon
from megazero.optim.narrow import MASTERS, Narrow
from megazero.optim.optimizer import Run
from megazero.plan.optimizers import AVERAGE, WHOLE, Optimizers
from megazero.zero.unit import Unit


class Mixture:
    """The optimizers of the elements that this rank updates; the interface is in `optim/optimizer.py`.

    Args:
        units: the units whose masters are updated, in place.
        optimizers: the optimizers of the whole model, from which the groups of the units' layouts were made.
        settings: the options of each optimizer.
        bucket: bytes; longer intervals are updated in pieces of this size where gradients have to be copied.
        ops: the kernels for the device of the masters.
        scratch: memory for copies and whole matrices, which optimizers share that update one after the other.
        seed: of the bits with which values in 16 bits are rounded.

    Attributes:
        kinds: the kinds of values that they keep.
    """

    def __init__(
        self,
        units: list[Unit],
        optimizers: Optimizers,
        settings: Mapping[str, Settings],
        *,
        bucket: int,
        ops: Operations,
        scratch: Scratch,
        seed: int = 0,
    ):
        self.settings, self.kinds, self._averages = settings, optimizers.kinds, optimizers.averages
        self._optimizers = optimizers
        self._is_narrow = any(
            torch.bfloat16 in (own.masters, own.state) for own in (u.resting.precision for u in units)
        )
        rounds = all(unit.resting.updated.values.dtype.itemsize == 2 for unit in units)
        self._adamw = ops.adamw_ if rounds and not self._is_narrow else None
        self._runs = {unit: list(_runs_of(unit, optimizers)) for unit in units}
        self._pieces = {unit: list(self._pieces_of(unit, bucket)) for unit in units}
        copied = [piece for unit in units for piece in self._pieces[unit] if self._copies(unit, piece.group.optimizer)]
        longest = max((piece.where.stop - piece.where.start for piece in copied), default=0)
        self._staging = units[0].resting.staging(scratch, "staging", longest) if units else torch.empty(0)
        self._narrow = Narrow(seed, self._pieces, 1 + len(self.kinds), scratch) if self._is_narrow else None
        self._muon = Muon(units, self._pieces, settings["muon"], scratch, self._staging, self._narrow)

    def runs(self, unit: Unit) -> Sequence[Run]:
        """Return the state of this rank's elements of a unit, in their order."""
        return self._runs.get(unit, ())

    def pieces(self, unit: Unit) -> Sequence[Piece]:
        """Return the pieces in which a unit is updated, in their order."""
        return self._pieces[unit]

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients times `scale`; see `Optimizer.update`."""
        pieces, divide_by = iter(self._pieces[unit]), scale.reciprocal().to(torch.float32)
        now = Now(lr, scale, divide_by, skip, 1.0 - skip, self.settings["adamw"].clip_value)
        self._muon.gather(unit, now)
        piece = next(pieces, None)
        state = self._runs[unit][0].state if unit.masters.is_meta else {}
        for where, (masters, gradients, *kept, updated) in unit.resting.update_windows(state, skip):
            while piece is not None and piece.where.stop <= where.stop:  # a piece never crosses a window's end
                here = slice(piece.where.start - where.start, piece.where.stop - where.start)
                own = [values[here] for values in kept] if piece.state is None else piece.state
                self._update(piece, Flats(masters[here], gradients[here], own, updated[here]), now)
                piece = next(pieces, None)
        assert piece is None or (unit.masters.is_meta and bool(skip)), "every piece is within a window"

    def _update(self, piece: Piece, flats: Flats, now: Now) -> None:
        if piece.group.optimizer != "adamw":  # whose kernels count
            piece.step.add_(now.keep)
        if self._averages:
            *state, average = flats.state
            self._update_masters(piece, flats._replace(state=state), now)
            average_(average, piece, flats.masters, now, self.settings["adamw"].average)
        else:
            self._update_masters(piece, flats, now)

    def _update_masters(self, piece: Piece, flats: Flats, now: Now) -> None:
        """Update masters, and state but averages."""
        if piece.group.optimizer in WHOLE:  # whose state has been updated
            flats = flats._replace(state=())
        if self._narrow is None:
            self._compute(piece, flats, now)
            return
        wide = self._narrow.widened(flats)
        self._compute(piece, wide, now)
        kinds = (MASTERS, *self._optimizers.states(piece.group.optimizer))
        for kind, new, own in zip(kinds, [wide.masters, *wide.state], [flats.masters, *flats.state], strict=False):
            self._narrow.round_(piece, kind, new, own, piece.step)
        if wide.masters is not flats.masters:
            round_(flats)

    def _compute(self, piece: Piece, flats: Flats, now: Now) -> None:
        name = piece.group.optimizer
        if name in WHOLE:
            self._muon.apply(piece, flats, now)
        else:
            now.limit_(flats.gradients, piece.group)
            if name == "adamw" and self._adamw is not None:  # it rounds too
                own, divide_by = self.settings[name], now.of(piece.group, now.divide_by)
                rates = (now.lr * piece.group.lr_factor, *own.betas, own.eps, piece.group.decay)
                masters, gradients, (first, second), updated = flats
                self._adamw(masters, gradients, first, second, updated, piece.step, divide_by, now.skip, *rates)
                return
            UPDATES[name](piece, flats, now, self.settings[name], self._staging)
        round_(flats)

    def _copies(self, unit: Unit, optimizer: str) -> bool:
        """Return whether an optimizer's gradients are copied before the update."""
        widens = self._adamw is None and unit.gradients.reduced.dtype != unit.masters.dtype
        return optimizer != "adamw" or self._is_narrow or widens

    def _pieces_of(self, unit: Unit, bucket: int) -> Iterator[Piece]:
        """Yield the pieces of a unit's shard: its groups, split where they are copied, and at the ends of windows.

        A window (`RestingState.update_windows`) is the part of a shard on disks that is in memory at once, else the
        shard. Parameters with whole matrices are pieces of their own.
        """
        for group, elements in unit.layout.group_slices(unit.shard):
            run = next(run for run in self._runs[unit] if elements.start < run.where.stop)
            for where in self._cuts(unit, group.optimizer, elements, bucket):
                here = slice(where.start - run.where.start, where.stop - run.where.start)
                state = None if unit.masters.is_meta else [values[here] for values in run.state.values()]
                yield Piece(where, group, state, torch.zeros((), dtype=torch.float32, device=unit.resting.updates_on))

    def _cuts(self, unit: Unit, optimizer: str, elements: slice, bucket: int) -> Iterator[slice]:
        longest = unit.resting.window
        if self._copies(unit, optimizer):  # round to a power of two, like the window length
            longest = min(longest, 1 << max(bucket // unit.resting.precision.update.itemsize, 16).bit_length() - 1)
        starts = [elements]
        if optimizer in WHOLE:
            spans = [slice(i.start - unit.shard.start, i.stop - unit.shard.start) for i in unit.layout.intervals]
            starts = [slice(max(s.start, elements.start), min(s.stop, elements.stop)) for s in spans]
        for part in starts:
            cut = part.start
            while cut < part.stop:
                stop = min((cut // longest + 1) * longest, part.stop)
                yield slice(cut, stop)
                cut = stop


def _runs_of(unit: Unit, optimizers: Optimizers) -> Iterator[Run]:
    """Yield the runs of a unit's shard, with new state."""
    for optimizer, own in groupby(unit.layout.group_slices(unit.shard), key=lambda pair: pair[0].optimizer):
        slices = [where for _, where in own]
        where = slice(slices[0].start, slices[-1].stop)
        numel = where.stop - where.start
        precision = unit.resting.precision
        dtypes = {k: precision.masters if k == AVERAGE else precision.state for k in optimizers.states(optimizer)}
        yield Run(where, optimizer, {kind: unit.resting.new_state(numel, dtype) for kind, dtype in dtypes.items()})
