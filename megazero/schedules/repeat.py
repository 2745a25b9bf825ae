"""Find what repeats in a rank's step, so that a simulation need not do a thousand micro-batches one after the other.

In the middle of a step a rank does the same few actions again and again, each time for the next micro-batches: in 1f1b
one forward and one backward. A step of fewer micro-batches is the same but for how often. So a step of m micro-batches
is one of m' < m with a block of its actions, [first, last), done 1 + times times, each time for micro-batches that are
`period` further on. That this is so is not assumed: the actions of m are put together from those of m' and compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megazero.schedules.actions import Action

_ROUNDS = 3  # of the period, beyond the micro-batches in flight, before a step is long enough to repeat something
_IN_FLIGHT = (1, 2, 3)  # times the ranks: tried one after the other


@dataclass(frozen=True)
class Shortened:
    """A step of fewer micro-batches, and the block of its actions that stands for more.

    Attributes:
        micro_batches: m', those of the shorter step.
        first, last: the block's actions are those of the shorter step from `first` to before `last`; as many before
            it are the same for the micro-batches before.
        times: how often the block is left out.
    """

    micro_batches: int
    first: int
    last: int
    times: int


def shortened(actions_of: Callable[[int], Sequence[Action]], micro_batches: int, ranks: int) -> Shortened | None:
    """Return the shortest step that stands for one of some micro-batches; None: nothing repeats, or it is short anyway.

    Args:
        actions_of: number of micro-batches -> this rank's actions in a step.
        ranks: of the pipeline.
    """
    whole = actions_of(micro_batches)
    for period, flight in ((period, flight) for flight in _IN_FLIGHT for period in dict.fromkeys((1, ranks))):
        fewer = micro_batches % period + period * (_ROUNDS + -(-flight * ranks // period))
        times = (micro_batches - fewer) // period
        if times > 0 and (found := _block(whole, actions_of(fewer), period, times)) is not None:
            return Shortened(fewer, *found, times)
    return None


def _block(whole: Sequence[Action], short: Sequence[Action], period: int, times: int) -> tuple[int, int] | None:
    """Return the block of `short` that `whole` has `times` more of; None: there is none."""
    length, rest = divmod(len(whole) - len(short), times)
    newest = max(action.micro_batch for action in short)  # the last micro-batch is not like the others
    last = min(_common(whole, short), next(n for n, action in enumerate(short) if action.micro_batch == newest))
    first = last - length
    if rest or first < length:
        return None
    before = [_later(action, period) for action in short[first - length : first]]
    repeats = before == list(short[first:last]) and _repeated(short, first, last, period, times) == list(whole)
    return (first, last) if repeats else None


def _common(one: Sequence[Action], other: Sequence[Action]) -> int:
    """Return how many actions at the beginning are the same."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _repeated(short: Sequence[Action], first: int, last: int, period: int, times: int) -> list[Action]:
    """Return the actions of the longer step."""

    def parts() -> Iterator[Action]:
        yield from short[:last]
        for number in range(1, times + 1):
            yield from (_later(action, number * period) for action in short[first:last])
        yield from (_later(action, times * period) for action in short[last:])

    return list(parts())


def _later(action: Action, micro_batches: int) -> Action:
    return replace(action, micro_batch=action.micro_batch + micro_batches)
