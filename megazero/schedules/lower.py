"""Passes over a schedule that add transfers and reductions.

    add_transfers     sends behind what makes a message, receives posted one computation before they are needed
    add_reductions    gradients go to where the optimizer state is: once a step (ZeRO stages 0 and 1), or after each
                      micro-batch (2 and 3); and the tied weight's gradient is summed over first and last stage

What forward and backward gather first (stage 3) belongs to the parts of the model (`zero/hooks.py`), not to a schedule.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megazero.schedules.actions import RECEIVES, SENDS, Action, B, Kind, Schedule, W


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
