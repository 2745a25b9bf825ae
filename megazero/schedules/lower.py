"""Passes over a schedule that add transfers, reductions, and the bytes of each.

    add_transfers     sends behind what makes a message, receives posted one computation before they are needed
    add_reductions    gradients go to where the optimizer state is: once a step (ZeRO stages 0 and 1), or after each
                      micro-batch (2 and 3); and the tied weight's gradient is summed over first and last stage
    add_bill          how many bytes each of these sends, and what forward and backward gather first (stage 3)

Gathering itself belongs to the parts of the model (`zero/hooks.py`); here it is only written down.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megazero.schedules.actions import RECEIVES, SENDS, Action, B, F, I, Kind, Schedule, W


@dataclass(frozen=True)
class TrafficBill:
    """Bytes that a rank sends, by the ring formula.

    Attributes:
        message: of one micro-batch's activations between two stages; their gradient is as long.
        reduce: of each stage one reduction of its gradients.
        gather_forward, gather_backward: of each stage what is gathered for one forward, and for one backward.
        tie: of the shared weight's gradient.
        replicas: of each stage the sum over the replicas of its shards, behind the last micro-batch.
    """

    message: int
    reduce: Sequence[int]
    gather_forward: Sequence[int]
    gather_backward: Sequence[int]
    tie: int = 0
    replicas: Sequence[int] = ()

    def of(self, action: Action, *, last: bool) -> int:
        """Return the bytes of an action, which may be of the step's last micro-batch."""
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            return self.message
        if action.kind is Kind.TIE:
            return self.tie
        by_stage = {F: self.gather_forward, B: self.gather_backward, I: self.gather_backward, Kind.REDUCE: self.reduce}
        more = self.replicas[action.stage] if self.replicas and last and action.kind is Kind.REDUCE else 0
        return more + (by_stage[action.kind][action.stage] if action.kind in by_stage else 0)


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


def add_bill(schedule: Schedule, bill: TrafficBill) -> Schedule:
    """Return the same actions with their bytes."""
    last = schedule.micro_batches - 1

    def billed(action: Action) -> Action:
        return replace(action, size=bill.of(action, last=action.micro_batch == last))

    return replace(schedule, ranks=tuple(tuple(map(billed, actions)) for actions in schedule.ranks))
