"""Simulate a schedule: prove that it cannot deadlock, and compute its bubble and its memory.

A rank does its actions in order. An action begins when the rank is free and what it needs is there:

    sF m    the output of stage s - 1        sI m, sB m    sF m, and the gradient from stage s + 1        sW m    sI m

A message takes `transfer` from the end of what made it to the other rank; sending and posting a receive never wait, so
only these dependencies can hold a rank up, and one pass over them decides: either every action gets its time, or the
ranks that are left each wait for something that will never be there.

    work       of a rank: the sum of its actions' durations
    makespan   until the last rank has ended: what a step with a common end (the gradient norm) takes
    span       the longest time from a rank's own first to its own last action: what a step costs where ranks need not
               wait for each other at its end, as the zero-bubble papers count
    bubble     (makespan - the most work) / the most work; without a common end (span - work) / work

Peak live counts the micro-batches of one stage whose activations a rank holds: from forward to the end of backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megazero.schedules.actions import Action, B, F, I, Kind, Schedule, W
from megazero.schedules.check import ScheduleError, check, marked


@dataclass(frozen=True)
class Costs:
    """The costs of a stage's actions, in any unit of time; a whole backward takes `input + weight`."""

    forward: float = 1
    input: float = 1
    weight: float = 1

    def of(self, kind: Kind) -> float:
        return {F: self.forward, B: self.input + self.weight, I: self.input, W: self.weight}[kind]


@dataclass(frozen=True)
class Timed:
    """An action with its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of all actions; `ranks[r]` are the computations of rank r in order."""

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def work(self) -> list[float]:
        return [sum(timed.end - timed.start for timed in rank) for rank in self.ranks]

    @property
    def makespan(self) -> float:
        return max((rank[-1].end for rank in self.ranks if rank), default=0)

    @property
    def span(self) -> float:
        return max((rank[-1].end - rank[0].start for rank in self.ranks if rank), default=0)

    @property
    def bubble(self) -> float:
        """Return the time that the busiest rank waits, over its work."""
        return _share(self.makespan, max(self.work))

    @property
    def bubble_without_common_end(self) -> float:
        return _share(self.span, max(self.work))


def _share(time: float, work: float) -> float:
    return (time - work) / work


def simulate(schedule: Schedule, costs: Sequence[Costs] | None = None, transfer: float = 0) -> Timeline:
    """Return the times of all computations.

    Args:
        costs: of each stage; None: every action takes 1, a whole backward 2.
        transfer: time of a message to another rank.

    Raises:
        ScheduleError: something is missing, done twice or in another order than micro-batches come, or waits for ever.
    """
    costs = costs or [Costs()] * schedule.num_stages
    check(schedule)
    ended: dict[tuple[int, Kind, int], float] = {}
    lists = [[action for action in actions if action.kind.computes] for actions in schedule.ranks]
    times: list[list[Timed]] = [[] for _ in lists]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            while len(times[rank]) < len(actions):
                action = actions[len(times[rank])]
                ready = _ready(schedule, action, ended, transfer)
                if ready is None:
                    break
                start = max(ready, times[rank][-1].end if times[rank] else 0)
                end = start + costs[action.stage].of(action.kind)
                times[rank].append(Timed(action, start, end))
                ended[action.stage, action.kind, action.micro_batch] = end
                progress = True
    stuck = {rank: actions[len(times[rank])] for rank, actions in enumerate(lists) if len(times[rank]) < len(actions)}
    if stuck:
        waits = "; ".join(f"rank {r} waits in {a} for {_awaited(schedule, a, ended)}" for r, a in stuck.items())
        places = {rank: schedule.ranks[rank].index(action) for rank, action in stuck.items()}
        raise ScheduleError(f"{schedule.name} never ends: {waits}\n{marked(schedule, places)}")
    return Timeline(tuple(map(tuple, times)))


def peak_live(schedule: Schedule) -> list[int]:
    """Return for each rank the most (stage, micro-batch) pairs whose activations are kept at once."""
    peaks = []
    for actions in schedule.ranks:
        live = most = 0
        for action in actions:
            live += {F: 1, B: -1, W: -1}.get(action.kind, 0)
            most = max(most, live)
        peaks.append(most)
    return peaks


def _needs(schedule: Schedule, action: Action) -> list[tuple[int, tuple[Kind, ...]]]:
    """Return (stage, alternative kinds) that must have ended for the same micro-batch."""
    stage, last = action.stage, schedule.num_stages - 1
    if action.kind is F:
        return [(stage - 1, (F,))] if stage > 0 else []
    if action.kind is W:
        return [(stage, (I,))]
    return [(stage, (F,))] + ([(stage + 1, (B, I))] if stage < last else [])


def _ready(
    schedule: Schedule, action: Action, ended: Mapping[tuple[int, Kind, int], float], transfer: float
) -> float | None:
    """Return when everything that an action needs is there; None: not yet."""
    times = [0.0]
    for stage, kinds in _needs(schedule, action):
        found = [ended[stage, k, action.micro_batch] for k in kinds if (stage, k, action.micro_batch) in ended]
        if not found:
            return None
        times.append(found[0] + (transfer if schedule.rank_of[stage] != schedule.rank_of[action.stage] else 0))
    return max(times)


def _awaited(schedule: Schedule, action: Action, ended: Mapping[tuple[int, Kind, int], float]) -> str:
    for stage, kinds in _needs(schedule, action):
        if all((stage, kind, action.micro_batch) not in ended for kind in kinds):
            names = " or ".join(f"{stage}{kind.value}{action.micro_batch}" for kind in kinds)
            return f"{names} of rank {schedule.rank_of[stage]}"
    raise AssertionError("it waits for nothing")
