"""Check, before anything runs, that a schedule is complete, in order and free of deadlocks.

A rank runs its actions in order. An action runs when the rank reaches it and its dependencies are done:

    sF m         the output of stage s - 1            sI m, sB m         sF m, and the gradient from stage s + 1
    sW m         sI m                                 sSEND, sREDUCE     the pass that computes the values
    sTIE m       sREDUCE m

If the lists have transfers, a message has arrived when it was sent and its receive has been posted. Sends and posts
never block, so only these dependencies can make a rank wait. One simulation of them decides: either every action runs,
or each remaining rank waits for an action that never runs.
"""

from collections import Counter
from collections.abc import Iterator

from megazero.schedules.actions import RECEIVES, SENDS, Action, B, F, I, Kind, Schedule, W

_AFTER = {
    B: (F,),
    I: (F,),
    W: (I,),
    Kind.SEND_FORWARD: (F,),
    Kind.SEND_BACKWARD: (B, I),
    Kind.REDUCE: (B, W),
    Kind.TIE: (Kind.REDUCE,),
}
_SPARSE = (Kind.REDUCE, Kind.TIE)  # these need not occur for every micro-batch

_Need = tuple[int, tuple[Kind, ...]]  # (stage, kinds): one of the kinds must be done for the micro-batch


class ScheduleError(ValueError):
    """The error of a schedule that would deadlock or is incomplete; its text contains all lists of actions."""


def check(schedule: Schedule) -> None:
    """Check a schedule. Raises ScheduleError, which names the faulty action and contains the lists."""
    for _ in played(schedule):
        pass


def played(schedule: Schedule) -> Iterator[tuple[int, Action, list[tuple[int, Kind]]]]:
    """Yield (rank, action, [(stage, kind) of its dependencies]) in an executable order.

    Raises:
        ScheduleError: an action is missing, duplicate, not in the order of micro-batches, or waits for ever.
    """
    _check_lists(schedule)
    sends = any(action.kind is Kind.SEND_FORWARD for actions in schedule.ranks for action in actions)
    done: set[tuple[int, Kind, int]] = set()
    places, moved = [0 for _ in schedule.ranks], True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needs = list(_needs(schedule, action, sends))
                m = action.micro_batch
                found = [(stage, kind) for stage, kinds in needs for kind in kinds if (stage, kind, m) in done]
                if len(found) < len(needs):
                    break
                yield rank, action, found
                done.add((action.stage, action.kind, m))
                places[rank] += 1
                moved = True
    stuck = {rank: at for rank, at in enumerate(places) if at < len(schedule.ranks[rank])}
    if stuck:
        waits = []
        for rank, place in stuck.items():
            action = schedule.ranks[rank][place]
            m, needs = action.micro_batch, _needs(schedule, action, sends)
            stage, kinds = next((s, kinds) for s, kinds in needs if not any((s, kind, m) in done for kind in kinds))
            names = " or ".join(f"{stage}{kind.value}{m}" for kind in kinds)
            waits.append(f"rank {rank} waits in {action} for {names} of rank {schedule.rank_of[stage]}")
        raise ScheduleError(f"{schedule.name} never ends: {'; '.join(waits)}\n{schedule}")


def _needs(schedule: Schedule, action: Action, sends: bool) -> Iterator[_Need]:
    """Yield the dependencies of an action.

    Args:
        sends: the lists have transfers.
    """
    stage, kind = action.stage, action.kind
    if kind in _AFTER:
        yield stage, _AFTER[kind]
    if kind in RECEIVES:
        receive, towards = RECEIVES[kind]
        other, made = stage + towards, (F,) if kind is F else (B, I)
        if sends and schedule.crosses(stage, other):
            yield stage, (receive,)
            yield other, (SENDS[made[0]][0],)
        elif 0 <= other < schedule.num_stages:
            yield other, made


def _check_lists(schedule: Schedule) -> None:
    """Check that each stage runs each micro-batch once, in order, on its rank, with backward whole or in two parts."""
    for rank, actions in enumerate(schedule.ranks):
        seen: Counter[tuple[int, Kind]] = Counter()  # the last micro-batch done, plus 1
        for place, action in enumerate(actions):
            stage, kind, m = action.stage, action.kind, action.micro_batch
            if not (stage < schedule.num_stages and schedule.rank_of[stage] == rank):
                raise _broken(schedule, rank, place, f"stage {stage} is not on rank {rank}")
            if m < seen[stage, kind] or (m > seen[stage, kind] and kind not in _SPARSE):
                raise _broken(schedule, rank, place, f"expected micro-batch {seen[stage, kind]}")
            seen[stage, kind] = m + 1
        for stage in schedule.stages_of(rank):
            forward, whole, parts = seen[stage, F], seen[stage, B], (seen[stage, I], seen[stage, W])
            m = schedule.micro_batches
            if forward != m or (whole, *parts) not in ((m, 0, 0), (0, m, m), (0, 0, 0)):
                got = f"stage {stage} has {forward} F, {whole} B, {parts[0]} I and {parts[1]} W"
                raise _broken(schedule, rank, len(actions), f"{got}, expected {m} F and {m} B, or {m} I and {m} W")


def _broken(schedule: Schedule, rank: int, place: int, reason: str) -> ScheduleError:
    actions = schedule.ranks[rank]
    at = actions[place] if place < len(actions) else "the end"
    return ScheduleError(f"{schedule.name} is broken at {at} of rank {rank}: {reason}\n{schedule}")
