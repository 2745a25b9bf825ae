"""Where each parameter lies in its unit's flat buffer.

A unit (one block, or the embedding, or the head) holds one flat buffer. Inside it the parameters that decay come
first, then the rest, and of these last the ones that every rank of the tensor axis holds whole (norms, biases of row
weights, learned positions), each group in the model's order:

    | decayed | not decayed, split over the tensor axis | not decayed, whole: the tail |

(with a few elements of padding behind the first and the last, zero for ever and never saved)

so that

- Adam is at most one fused call for each weight-decay value,
- with sequence parallelism, where a rank has seen only its own tokens of what the tail's gradients sum up, one
  all-reduce of the tail over the tensor axis completes them, and the norm counts them once,
- collectives, norms and copies run on contiguous memory,
- any part of any parameter is an interval (parameter, start, stop) of the buffer, and a checkpoint written on one
  grid is read on another by the overlap of intervals.
"""

import math
from dataclasses import dataclass

# Elements that what decays, what does not, and every shard are made a multiple of. Vectorised kernels treat the last
# few elements of a tensor one by one, and may round them otherwise: with this they treat an element alike wherever the
# buffer is cut, and AdamW gives the same bits in every stage.
ALIGNMENT = 16


@dataclass(frozen=True)
class Entry:
    """A parameter before it has a place: full name, this rank's shape, whether it decays, whether it is split."""

    name: str
    shape: tuple[int, ...]
    decay: bool
    split: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Interval:
    """A parameter's place: elements [start, stop) of the unit's flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class UnitLayout:
    """The flat buffer of one unit.

    Attributes:
        name: of the unit, for messages and profiles.
        intervals: every parameter once, in buffer order.
        decayed: elements [0, decayed) decay, padding included; [decayed, numel) do not.
        tail: elements [tail, numel) are whole on every rank of the tensor axis.
    """

    name: str
    intervals: tuple[Interval, ...]
    decayed: int
    tp_replicated: int

    @property
    def numel(self) -> int:
        return self.intervals[-1].stop

    def padded(self, parts: int) -> int:
        """Elements with the padding that lets `parts` ranks have equal shards."""
        return aligned(max(self.numel, self.decayed), parts)


def lay_out(name: str, entries: list[Entry]) -> UnitLayout:
    """Places the entries of one unit one behind the other, decayed ones first."""
    assert all(entry.split or not entry.decay for entry in entries), "what decays is a matrix, and split"
    # sorted is stable: the model's order within each group
    ordered = sorted(entries, key=lambda entry: (not entry.decay, not entry.split))
    intervals, start = [], 0
    decayed = aligned(sum(entry.numel for entry in entries if entry.decay))
    for entry in ordered:
        start = start if entry.decay else max(start, decayed)
        intervals.append(Interval(entry.name, entry.shape, start, start + entry.numel))
        start += entry.numel
    tp_replicated = next((i.start for i, e in zip(intervals, ordered, strict=True) if not e.split), start)
    return UnitLayout(name, tuple(intervals), decayed, tp_replicated)


def aligned(numel: int, parts: int = 1) -> int:
    """`numel` rounded up so that each of `parts` equal parts is a multiple of the alignment."""
    unit = ALIGNMENT * parts
    return -(-numel // unit) * unit
