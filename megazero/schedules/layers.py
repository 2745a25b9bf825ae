"""Cut the model into stages, which blocks belong to which, and lower a schedule to what every rank does.

Blocks are alike, the ends are not: the first stage has the embedding too, the last the final norm and the output
projection, which costs about as much as V / (12 h) blocks. Every stage has at least one block, and each further block
goes to the rank that has least to do, there to the stage that has least. For blocks of equal cost that makes the
busiest rank's work as small as it can be.

Lowering adds to a schedule

    add_transfers     sends after what makes a message, receives posted one computation before they are needed
    add_reductions    gradients go to where the optimizer state is: once a step (ZeRO stages 0 and 1), or after each
                      micro-batch (2 and 3); and the tied weight's gradient is summed over first and last stage

What forward and backward gather first (stage 3) belongs to the parts of the model (`zero/hooks.py`), not to a schedule.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megazero.schedules.actions import RECEIVES, SENDS, Action, B, Kind, Schedule, W
from megazero.schedules.catalogue import make
from megazero.schedules.check import check


@dataclass(frozen=True)
class Layers:
    """The cut of a model into stages on the pipeline axis.

    Attributes:
        schedule, ranks, chunks: as in the config.
        rank_of: of each stage its rank.
        parts: of each stage the parts of the model's path: 0 is the embedding, the last the head.
    """

    schedule: str
    ranks: int
    chunks: int
    rank_of: tuple[int, ...]
    parts: list[range]

    def of_rank(self, rank: int) -> dict[int, range]:
        """Return the stages of a rank, each with its parts of the path."""
        return {stage: self.parts[stage] for stage, where in enumerate(self.rank_of) if where == rank}


@cache
def cut(schedule: str, ranks: int, chunks: int, blocks: int, head: float) -> Layers:
    """Return the cut of a model of some blocks whose head costs as much as `head` of them."""
    rank_of = make(schedule, ranks, 1, chunks).rank_of
    return Layers(schedule, ranks, chunks, rank_of, split(blocks, rank_of, head))


def split(blocks: int, rank_of: Sequence[int], head: float) -> list[range]:
    """Return for each stage the parts of the model's path that it runs: 0 is the embedding, the last the head.

    Args:
        blocks: their number in the model; at least one for each stage.
        rank_of: of each stage the rank that computes it.
        head: what it costs, in blocks; the embedding costs nothing.
    """
    stages = range(len(rank_of))
    assert blocks >= len(stages), f"{blocks} blocks in {len(stages)} stages: held by the config"
    costs = [1.0 for _ in stages]
    costs[-1] += head
    counts = [1 for _ in stages]
    work: dict[int, float] = {}
    for stage, rank in enumerate(rank_of):
        work[rank] = work.get(rank, 0.0) + costs[stage]
    for _ in range(blocks - len(stages)):
        # Of equals the last: earlier stages hold more micro-batches.
        stage = min(reversed(stages), key=lambda k: (round(work[rank_of[k]], 6), round(costs[k], 6)))
        costs[stage] += 1
        work[rank_of[stage]] += 1
        counts[stage] += 1
    firsts = [1 + sum(counts[:k]) for k in stages]
    cuts = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    cuts[0] = range(cuts[0].stop)
    cuts[-1] = range(cuts[-1].start, blocks + 2)
    return cuts


def lowered(layers: Layers, micro_batches: int, *, each: bool, tied: bool) -> Schedule:
    """Return what every rank does in a step, proven to end.

    Args:
        each: gradients are reduced after each micro-batch, not once a step.
        tied: the first and the last stage share a weight.

    Raises:
        ScheduleError: it would not end; a fault of ours.
    """
    schedule = add_transfers(make(layers.schedule, layers.ranks, micro_batches, layers.chunks))
    schedule = add_reductions(schedule, each=each, tied=tied)
    check(schedule)
    return schedule


def add_transfers(schedule: Schedule) -> Schedule:
    """Add the sends and receives; there are none between stages of one rank."""

    def messages(action: Action, table: Mapping[Kind, tuple[Kind, int]]) -> Iterator[Action]:
        if action.kind in table:
            kind, towards = table[action.kind]
            if schedule.crosses(action.stage, action.stage + towards):
                yield replace(action, kind=kind)

    def rank(actions: Sequence[Action]) -> Iterator[Action]:
        yield from messages(actions[0], RECEIVES) if actions else ()
        for here, following in zip(actions, [*actions[1:], None], strict=True):
            if following is not None:
                yield from messages(following, RECEIVES)
            yield here
            yield from messages(here, SENDS)

    return replace(schedule, ranks=tuple(tuple(rank(actions)) for actions in schedule.ranks))


def add_reductions(schedule: Schedule, *, each: bool, tied: bool) -> Schedule:
    """Add the reductions, after what a stage has to send.

    Args:
        each: reduce after every micro-batch, not only after the last.
        tied: the first and the last stage share a weight; where they are on one rank, there is nothing to sum.
    """
    last, ends = schedule.micro_batches - 1, (0, schedule.num_stages - 1)
    tied = tied and schedule.rank_of[ends[0]] != schedule.rank_of[ends[1]]

    def rank(actions: Sequence[Action]) -> Iterator[Action]:
        waiting: list[Action] = []  # for the sends
        ties: list[Action] = []
        for action in actions:
            if action.kind not in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                yield from waiting
                waiting = []
            yield action
            if action.kind in (B, W) and (each or action.micro_batch == last):
                waiting.append(Action(action.stage, Kind.REDUCE, action.micro_batch))
                if tied and action.stage in ends and action.micro_batch == last:
                    ties.append(Action(action.stage, Kind.TIE, last))
        yield from (*waiting, *ties)

    return replace(schedule, ranks=tuple(tuple(rank(actions)) for actions in schedule.ranks))
