"""Update masters and state that rest in 16 bits: widen them, update them in fp32, and round the results stochastically.

A bf16 value has 8 bits, so an update of less than 1/512 of it would be lost each time if results were rounded to the
nearest value. Stochastic rounding takes the next value up or down with probabilities that make the mean exact (Gupta et
al. 2015, arXiv 1502.02551; Zamirai et al. 2020, arXiv 2010.06192):

    round(x) = the 16 upper bits of (bits of x as an integer + r),  r uniform in 0 ... 2^16 - 1

r is a function of the seed, the kind of value, the parameter, the element's index in the whole parameter, and the
number of the update: so every layout, and a run that resumes, rounds alike. A value that an update leaves as it is
stays.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from megazero.comm.pool import Scratch
from megazero.kernels import counter
from megazero.optim.elements import Flats, Piece
from megazero.zero.unit import Unit

MASTERS = "masters"  # the kind of value of the masters
_LOW, _HIGH = 0xFFFF, -0x10000


class Narrow:
    """Widens the 16-bit values of pieces, and rounds them after their update.

    Args:
        seed: of the random bits.
        pieces: all pieces with such values, by unit.
        most: the most values of an element that are widened at once.
        scratch: has memory for them.
    """

    def __init__(self, seed: int, pieces: Mapping[Unit, Sequence[Piece]], most: int, scratch: Scratch):
        self._seed = seed
        self._spans = {piece: list(_spans(unit, piece)) for unit, own in pieces.items() for piece in own}
        longest = max((piece.where.stop - piece.where.start for piece in self._spans), default=0)
        first = [*pieces][:1]
        self._wide = [unit.resting.staging(scratch, f"wide {i}", longest) for unit in first for i in range(most)]

    def widen(self, values: Iterable[Tensor]) -> list[Tensor]:
        """Return values of one piece in fp32, those in 16 bits as copies, which are valid until the next call."""
        room = iter(self._wide)
        return [next(room)[: len(x)].copy_(x) if x.dtype == torch.bfloat16 else x for x in values]

    def widened(self, flats: Flats) -> Flats:
        """Return the values of a piece in fp32; see `widen`."""
        masters, *state = self.widen([flats.masters, *flats.state])
        return Flats(masters, flats.gradients, state, flats.updated if masters is flats.masters else masters)

    def round_(self, piece: Piece, kind: str, wide: Tensor, narrow: Tensor, step: Tensor) -> None:
        """Write a kind of values of a piece, rounded, from their copies; nothing if they were not copied.

        Args:
            step: the number of the update, from 1; 0-dim.
        """
        if wide is narrow:
            return
        bits = wide.view(torch.int32)
        for here, first, name in self._spans[piece]:
            key = counter.derive_key(self._seed, name, xxhash.xxh64_intdigest(kind.encode()))
            words = counter.words(key, first, first + here.stop - here.start, step)
            bits[here] += words.bitwise_and_(_LOW)
        narrow.copy_(bits.bitwise_and_(_HIGH).view(torch.float32))


def _spans(unit: Unit, piece: Piece) -> Iterable[tuple[slice, int, int]]:
    """Yield each slice of a piece that is of one parameter, the index of its first element, and the name's digest."""
    begin = unit.shard.start + piece.where.start
    end = unit.shard.start + piece.where.stop
    for interval in unit.layout.intervals:
        start, stop = max(interval.start, begin), min(interval.stop, end)
        if start < stop:
            first = interval.first + start - interval.start
            yield slice(start - begin, stop - begin), first, xxhash.xxh64_intdigest(interval.name.encode())
