"""Simulate a schedule: compute its bubble and its memory.

An action starts when its rank is free and its dependencies are done (`check.py`). A message arrives at the other rank
`transfer` after the end of the pass that computed it.

    work       of a rank: the sum of its actions' durations
    makespan   time until the last rank has ended: a step's time if it has a common end (the gradient norm)
    span       the longest time from a rank's first to its last action: a step's time if ranks need not wait for each
               other at its end, as the zero-bubble papers count
    bubble     (makespan - largest work) / largest work; without a common end (span - largest work) / largest work

Peak live is the largest number of (stage, micro-batch) pairs whose activations a rank keeps, from forward to the end of
backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megazero.schedules.actions import COMPUTE, Action, B, F, I, Kind, Schedule, W
from megazero.schedules.check import played


@dataclass(frozen=True)
class Costs:
    """The durations of a stage's actions, in any unit of time; a whole backward takes `input + weight`."""

    forward: float = 1
    input: float = 1
    weight: float = 1

    def of(self, kind: Kind) -> float:
        """Return the duration of a kind of action."""
        return {F: self.forward, B: self.input + self.weight, I: self.input, W: self.weight}[kind]


@dataclass(frozen=True)
class Timed:
    """An action with its start and end times."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of all computations; `ranks[r]` are those of rank r in order."""

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def work(self) -> list[float]:
        """Return the compute time of each rank."""
        return [sum(timed.end - timed.start for timed in rank) for rank in self.ranks]

    @property
    def makespan(self) -> float:
        """Return the time from the start of a step to its end."""
        return max((rank[-1].end for rank in self.ranks if rank), default=0)

    @property
    def span(self) -> float:
        """Return the longest time from the first to the last action of a rank."""
        return max((rank[-1].end - rank[0].start for rank in self.ranks if rank), default=0)

    @property
    def bubble(self) -> float:
        """Return the waiting time of the busiest rank, divided by its work."""
        return _share(self.makespan, max(self.work))

    @property
    def bubble_without_common_end(self) -> float:
        """Return (span - work) / work for the largest work of a rank."""
        return _share(self.span, max(self.work))


def _share(time: float, work: float) -> float:
    return (time - work) / work


def simulate(schedule: Schedule, costs: Sequence[Costs] | None = None, transfer: float = 0) -> Timeline:
    """Return the times of all computations.

    Args:
        costs: for each stage; None: every action takes 1, a whole backward 2.
        transfer: duration of a message to another rank.

    Raises:
        ScheduleError: see `played`.
    """
    costs = costs or [Costs()] * schedule.num_stages
    ended: dict[tuple[int, Kind, int], float] = {}
    times: list[list[Timed]] = [[] for _ in schedule.ranks]
    for rank, action, needs in played(schedule):
        stage, kind, m = action.stage, action.kind, action.micro_batch
        start = times[rank][-1].end if times[rank] else 0.0  # when the rank is free
        for other, what in needs:
            start = max(start, ended[other, what, m] + (transfer if schedule.rank_of[other] != rank else 0.0))
        computes = kind in COMPUTE
        end = ended[stage, kind, m] = start + (costs[stage].of(kind) if computes else 0.0)
        if computes:
            times[rank].append(Timed(action, start, end))
    return Timeline(tuple(map(tuple, times)))


def peak_live(schedule: Schedule) -> list[int]:
    """Return for each rank the largest number of (stage, micro-batch) pairs with activations kept at once."""
    return list(map(most_live, schedule.ranks))


def most_live(actions: Sequence[Action]) -> int:
    """Return the largest number of forwards whose activations a rank holds at once, through its actions."""
    return max(accumulate({F: 1, B: -1, W: -1}.get(action.kind, 0) for action in actions), default=0)
