"""Find what repeats in a rank's step, so that a simulation need not do a thousand micro-batches one after the other.

A rank repeats a few actions again and again, each time for the next micro-batches: in 1f1b some forwards, then one
backward and one forward many times, then as many backwards as there were forwards. What one stage computes comes in the
order of micro-batches, so a step is a list of (stage, kind) in which some blocks stand many times in a row, and with
fewer copies of them it is a step of fewer micro-batches. Copies are left out so that no kind loses more than another:
of a block that has all kinds equally often, or of two that have them so together, as the forwards before and the
backwards behind. Nothing is assumed of a schedule: equal copies are looked for in its list of actions.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megazero.schedules.actions import Action, Kind

_COPIES = 3  # that stay: one that may begin something, one that stands for those left out, one to compare it with

_Step = tuple[int, Kind]  # stage, kind
_Token = tuple[int, Kind, bool]  # and whether the micro-batch is the last, which is not like the others


@dataclass(frozen=True)
class Block:
    """A block of actions of which copies are left out.

    Attributes:
        first, last: the copy that stands for them is the shorter step's actions from `first` to before `last`; the one
            before it and the one behind it are there too.
        times: how many are left out.
    """

    first: int
    last: int
    times: int


@dataclass(frozen=True)
class Shortened:
    """A step of fewer micro-batches that stands for a longer one.

    Attributes:
        micro_batches: its number of them.
        actions: its actions.
        originals: of each the action of the longer step that it stands for.
        blocks: what the longer step has more of, in order; none: nothing repeats, or it is short anyway.
    """

    micro_batches: int
    actions: tuple[Action, ...]
    originals: tuple[Action, ...]
    blocks: tuple[Block, ...] = ()


def unshortened(whole: Sequence[Action]) -> Shortened:
    """Return a step as it is."""
    return Shortened(_newest(whole) + 1, tuple(whole), tuple(whole))


def shortened(whole: Sequence[Action], ranks: int) -> Shortened:
    """Return the step of fewest micro-batches that stands for a rank's.

    Args:
        whole: the rank's actions in a step.
        ranks: of the pipeline.
    """
    newest = _newest(whole)
    kinds = {(action.stage, action.kind) for action in whole if action.micro_batch == newest // 2}
    # Blocks of one or two micro-batches; in an interleaved schedule of as many as there are ranks.
    lengths = dict.fromkeys([*range(1, 2 * len(kinds) + 1), len(kinds) * ranks])
    runs = list(_runs([(a.stage, a.kind, a.micro_batch == newest) for a in whole], list(lengths)))
    for paired in (True, False):
        found = _without(whole, runs, _left_out(runs, kinds, paired=paired))
        if _orders(found.actions) <= _orders(whole):
            return found
    return unshortened(whole)


@dataclass(frozen=True)
class _Run:
    """Equal blocks of actions in a row: where they begin, how long one is, how many there are, what one has."""

    first: int
    length: int
    copies: int
    counts: Counter[_Step]


def _runs(tokens: Sequence[_Token], lengths: Sequence[int]) -> Iterator[_Run]:
    """Yield the runs of more blocks than stay, from the first action on the one that reaches furthest."""
    at = 0
    while at < len(tokens):
        found = [(n * copies, -n) for n in lengths if (copies := _copies(tokens, at, n)) > _COPIES]
        reach, negative = max(found, default=(1, -1))  # of equal ones the shortest block
        if found:
            block = tokens[at : at - negative]
            yield _Run(at, len(block), reach // len(block), Counter((stage, kind) for stage, kind, _ in block))
        at += reach


def _copies(tokens: Sequence[_Token], at: int, length: int) -> int:
    """Return how often the block of some length that begins at `at` stands there in a row."""
    block, copies = tokens[at : at + length], 1
    while tokens[at + copies * length : at + (copies + 1) * length] == block:
        copies += 1
    return copies


def _left_out(runs: Sequence[_Run], kinds: set[_Step], *, paired: bool) -> list[int]:
    """Return of each run how many copies can be left out.

    Args:
        kinds: what a step has for each micro-batch.
        paired: leave out copies of two runs that have all kinds equally often only together, too.
    """

    def has_all(counts: Counter[_Step]) -> bool:
        return len({counts[kind] for kind in kinds}) == 1

    times = [run.copies - _COPIES if has_all(run.counts) else 0 for run in runs]
    for one, run in enumerate(runs) if paired else ():
        others = (n for n in range(one + 1, len(runs)) if not times[n] and has_all(run.counts + runs[n].counts))
        if not times[one] and (other := next(others, None)) is not None:
            times[one] = times[other] = min(run.copies, runs[other].copies) - _COPIES
    return times


def _without(whole: Sequence[Action], runs: Sequence[_Run], times: Sequence[int]) -> Shortened:
    """Return the step without some copies of each run, its micro-batches counted anew."""
    kept: list[int] = []
    blocks, at = [], 0
    for run, left_out in zip(runs, times, strict=True):
        if left_out:
            behind = run.first + 2 * run.length
            kept += range(at, behind)
            blocks.append(Block(len(kept) - run.length, len(kept), left_out))
            at = behind + left_out * run.length
    originals = tuple(whole[number] for number in (*kept, *range(at, len(whole))))
    newest, counts = _newest(whole), Counter((action.stage, action.kind) for action in originals)
    last = max(counts.values()) - 1
    seen: Counter[_Step] = Counter()
    actions = []
    for action in originals:
        step = action.stage, action.kind
        actions.append(replace(action, micro_batch=last if action.micro_batch == newest else seen[step]))
        seen[step] += 1
    return Shortened(last + 1, tuple(actions), originals, tuple(blocks))


def _orders(actions: Sequence[Action]) -> set[tuple[_Step, ...]]:
    """Return the orders in which micro-batches go through the step: a forward before its backward, and so on."""
    orders: dict[int, list[_Step]] = {}
    for action in actions:
        orders.setdefault(action.micro_batch, []).append((action.stage, action.kind))
    return {tuple(order) for order in orders.values()}


def _newest(actions: Sequence[Action]) -> int:
    return max(action.micro_batch for action in actions)
