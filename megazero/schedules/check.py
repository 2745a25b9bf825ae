"""Check a schedule against what every schedule has to keep, before anything runs.

Each stage does each micro-batch once, in order, on the rank that has it; its backward whole, or in two parts, or not at
all. With transfers in the lists: outputs are computed before they are sent, receives are posted before waits, and every
message has a sender and a receiver. Deadlocks are found by `simulate`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from megazero.schedules.actions import RECEIVES, Action, B, F, I, Kind, Schedule, W

_SENDS = {Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1), Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1)}
_AFTER = {
    W: (I,),
    Kind.SEND_FORWARD: (F,),
    Kind.SEND_BACKWARD: (B, I),
    Kind.REDUCE: (B, W),
    Kind.TIE: (Kind.REDUCE,),
}
_SPARSE = (Kind.REDUCE, Kind.TIE)  # not done for every micro-batch


class ScheduleError(ValueError):
    """An error of a schedule that would not end, or not compute the gradient; its text has all lists of actions."""


def check(schedule: Schedule) -> None:
    """Check a schedule. Raises ScheduleError: the lists, with the culprit marked."""
    with_transfers = any(a.kind in _SENDS for actions in schedule.ranks for a in actions)
    for rank, actions in enumerate(schedule.ranks):
        seen: Counter[tuple[int, Kind]] = Counter()  # how many have been done, and of the sparse ones the last, plus 1
        for place, action in enumerate(actions):
            if reason := next(_wrong(schedule, rank, action, seen, with_transfers), None):
                raise _broken(schedule, rank, place, reason)
            seen[action.stage, action.kind] = action.micro_batch + 1
        for stage in schedule.stages_of(rank):
            forward, whole, parts = seen[stage, F], seen[stage, B], (seen[stage, I], seen[stage, W])
            m = schedule.micro_batches
            if forward != m or (whole, *parts) not in ((m, 0, 0), (0, m, m), (0, 0, 0)):
                got = f"stage {stage} has {forward} F, {whole} B, {parts[0]} I and {parts[1]} W"
                raise _broken(schedule, rank, len(actions), f"{got}, expected {m} F and {m} B, or {m} I and {m} W")
    _check_messages(schedule)


def _wrong(
    schedule: Schedule, rank: int, action: Action, seen: Counter[tuple[int, Kind]], with_transfers: bool
) -> Iterator[str]:
    """Yield the reasons why a rank cannot do an action now."""
    stage, kind, m = action.stage, action.kind, action.micro_batch
    if not (stage < schedule.num_stages and schedule.rank_of[stage] == rank):
        yield f"stage {stage} is not on rank {rank}"
    if m < seen[stage, kind] or (m > seen[stage, kind] and kind not in _SPARSE):
        yield f"expected micro-batch {seen[stage, kind]}"
    if (before := _AFTER.get(kind)) and all(seen[stage, k] <= m for k in before):
        yield f"{' or '.join(f'{stage}{k.value}{m}' for k in before)} has not been done"
    if kind in (B, I) and seen[stage, F] <= m:
        yield f"{stage}F{m} has not been done"
    if kind in RECEIVES and with_transfers:
        receive, towards = RECEIVES[kind]
        if schedule.crosses(stage, stage + towards) and seen[stage, receive] <= m:
            yield f"{stage}{receive.value}{m} has not been posted"


def _check_messages(schedule: Schedule) -> None:
    """Check that every message is sent and received."""
    lists = list(enumerate(schedule.ranks))
    posted = {(a.stage, a.kind, a.micro_batch) for _, actions in lists for a in actions}
    for rank, actions in lists:
        for place, action in enumerate(actions):
            if action.kind in _SENDS:
                receive, towards = _SENDS[action.kind]
                if (action.stage + towards, receive, action.micro_batch) not in posted:
                    raise _broken(schedule, rank, place, f"nobody receives it in stage {action.stage + towards}")
            for send, (receive, towards) in _SENDS.items():
                if action.kind is receive and (action.stage - towards, send, action.micro_batch) not in posted:
                    raise _broken(schedule, rank, place, f"nobody sends it in stage {action.stage - towards}")


def _broken(schedule: Schedule, rank: int, place: int, reason: str) -> ScheduleError:
    actions = schedule.ranks[rank]
    at = actions[place] if place < len(actions) else "the end"
    text = f"{schedule.name} is broken at {at} of rank {rank}: {reason}"
    return ScheduleError(f"{text}\n{marked(schedule, {rank: place})}")


def marked(schedule: Schedule, culprits: Mapping[int, int]) -> str:
    """Return a line for each rank, with >action< at the culprit's place in its list, or >< at the list's end."""
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        words = [str(action) for action in actions]
        if (place := culprits.get(rank)) is not None:
            words[place : place + 1] = [f">{''.join(words[place : place + 1])}<"]
        lines.append(f"rank {rank:<3} {' '.join(words)}")
    return "\n".join(lines)
