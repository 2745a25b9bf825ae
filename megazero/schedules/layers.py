"""Split the model's layers into pipeline stages, and lower a schedule to the actions of every rank.

The first stage also has the embedding, and the last one the final norm and the output projection, which costs about as
much as V / (12 h) blocks. Every stage has at least one block. Blocks of equal cost are dealt one by one: each goes to
the rank with the least work, and there to the stage with the least, which minimises the work of the busiest rank.
Blocks of different costs fill the stages from the last to the first, each up to an equal share of a rank's work; the
smallest share with which all blocks find a place is taken; or they are dealt too, if the busiest rank then has less.

Lowering adds to a schedule

    add_transfers     sends after the pass that computes a message; receives posted one computation before their use
    add_reductions    reductions of gradients to the owners of the optimizer state, once a step (ZeRO stages 0 and 1) or
                      after each micro-batch (2 and 3), and the sum of a tied weight's gradient over both end stages

All-gathers of parameters (stage 3) belong to the model's layers (`zero/hooks.py`), not to a schedule.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from megazero.schedules.actions import RECEIVES, SENDS, Action, B, Kind, Schedule, W
from megazero.schedules.catalogue import make


@dataclass(frozen=True)
class Layers:
    """The assignment of a model's layers to stages on the pipeline axis.

    Attributes:
        schedule, ranks, chunks: as in the config.
        rank_of: for each stage, its rank.
        parts: for each stage, its range of the model's layers: 0 is the embedding, the last index the head.
        costs: for each stage, its work, in units of the first block's.
    """

    schedule: str
    ranks: int
    chunks: int
    rank_of: tuple[int, ...]
    parts: list[range]
    costs: list[float]

    def of_rank(self, rank: int) -> dict[int, range]:
        """Return the stages of a rank, each with its range of layers."""
        return {stage: self.parts[stage] for stage, where in enumerate(self.rank_of) if where == rank}


@cache
def cut(schedule: str, ranks: int, chunks: int, blocks: tuple[float, ...], head: float) -> Layers:
    """Return the assignment for a model whose blocks, and whose head, have these costs."""
    rank_of = make(schedule, ranks, 1, chunks).rank_of
    parts = split(blocks, rank_of, head)
    costs = [sum(blocks[max(each.start, 1) - 1 : each.stop - 1]) for each in parts]
    costs[-1] += head
    return Layers(schedule, ranks, chunks, rank_of, parts, costs)


def split(blocks: Sequence[float], rank_of: Sequence[int], head: float) -> list[range]:
    """Return for each stage the range of the model's layers that it runs: 0 is the embedding, the last the head.

    Args:
        blocks: cost of each block in the model, at least one for each stage.
        rank_of: for each stage, the rank that computes it.
        head: cost of the head; the embedding costs nothing.
    """
    assert len(blocks) >= len(rank_of), f"{len(blocks)} blocks in {len(rank_of)} stages: held by the config"
    counts = _dealt(len(blocks), rank_of, head * len(blocks) / sum(blocks))
    if min(blocks) < max(blocks):
        counts = min(counts, _filled(blocks, rank_of, head), key=lambda found: _most(found, blocks, rank_of, head))
    firsts = [1 + sum(counts[:k]) for k in range(len(counts))]
    cuts = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    cuts[0] = range(cuts[0].stop)
    cuts[-1] = range(cuts[-1].start, len(blocks) + 2)
    return cuts


def _most(counts: Sequence[int], blocks: Sequence[float], rank_of: Sequence[int], head: float) -> float:
    """Return the work of the busiest rank, if each stage has so many blocks."""
    work, costs = {rank_of[-1]: head}, iter(blocks)
    for rank, count in zip(rank_of, counts, strict=True):
        work[rank] = work.get(rank, 0.0) + sum(islice(costs, count))
    return max(work.values())


def _dealt(blocks: int, rank_of: Sequence[int], head: float) -> list[int]:
    """Return the number of blocks of each stage; all blocks cost 1."""
    stages = range(len(rank_of))
    costs = [1.0 for _ in stages]
    costs[-1] += head
    counts = [1 for _ in stages]
    work: dict[int, float] = {}
    for stage, rank in enumerate(rank_of):
        work[rank] = work.get(rank, 0.0) + costs[stage]
    for _ in range(blocks - len(stages)):
        # Among equals take the last stage, because earlier stages keep more micro-batches.
        stage = min(reversed(stages), key=lambda k: (round(work[rank_of[k]], 6), round(costs[k], 6)))
        costs[stage] += 1
        work[rank_of[stage]] += 1
        counts[stage] += 1
    return counts


def _filled(blocks: Sequence[float], rank_of: Sequence[int], head: float) -> list[int]:
    """Return the number of blocks of each stage, such that the busiest rank's work is small."""
    chunks = len(rank_of) // len(set(rank_of))
    low, high = 0.0, (sum(blocks) + head) * (chunks + 1)
    counts: list[int] = []
    for _ in range(40):  # the share of a rank, to 12 digits
        share = (low + high) / 2
        found = _fill(blocks, [(share - head * (rank == rank_of[-1])) / chunks for rank in rank_of])
        low, high, counts = (share, high, counts) if found is None else (low, share, found)
    return counts


def _fill(blocks: Sequence[float], room: Sequence[float]) -> list[int] | None:
    """Return the number of blocks that each stage takes if it has this room; None if some find no place."""
    counts = [1 for _ in room]
    end = len(blocks)
    for stage in reversed(range(len(room))):
        end -= 1  # its first block, for which there is always a place
        work = blocks[end]
        while end > stage and work + blocks[end - 1] <= room[stage]:
            end -= 1
            work += blocks[end]
            counts[stage] += 1
    return counts if end == 0 else None


def lowered(layers: Layers, micro_batches: int, *, each: bool, tied: bool) -> Schedule:
    """Return the actions of every rank in a step; `check.py` proves that they cannot deadlock.

    Args:
        each: reduce gradients after each micro-batch, not once a step.
        tied: the first and the last stage share a weight.
    """
    schedule = add_transfers(make(layers.schedule, layers.ranks, micro_batches, layers.chunks))
    return add_reductions(schedule, each=each, tied=tied)


def add_transfers(schedule: Schedule) -> Schedule:
    """Add sends and receives between stages of different ranks."""

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
    """Add the reductions, each after the stage's pending sends.

    Args:
        each: reduce after every micro-batch, not only after the last.
        tied: the first and the last stage share a weight; if they are on one rank, there is nothing to sum.
    """
    last, ends = schedule.micro_batches - 1, (0, schedule.num_stages - 1)
    tied = tied and schedule.rank_of[ends[0]] != schedule.rank_of[ends[1]]

    def rank(actions: Sequence[Action]) -> Iterator[Action]:
        waiting: list[Action] = []  # reductions to add after the sends
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
