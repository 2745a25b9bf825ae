"""Find the rank at fault from the status of all ranks, and say in one line which rank and which operation it was.

The rank that complains is rarely the one to blame. It waits in an operation; any rank of that operation that has not
begun it either waits in another operation, which is examined next, or waits in none: there the chain ends. If all have
begun it, the one that has not given up is blocked in it. A process of this host that is stopped is to blame wherever
the chain ends: the system reports it. Ranks that began different operations under the same number disagree, which no
waiting will resolve.
"""

import signal
from collections.abc import Sequence
from typing import Any

from megazero.base.errors import UserError
from megazero.comm.status_board import DONE, EMPTY, FAILED, P2P, RUNNING, STUCK, Operation, RankStatus

SLOW = "stopped, slow or cut off? raise parallel.timeout for long operations"
STOPPED = "it is stopped (SIGSTOP, a debugger?): continue or end it"


def death(standing: RankStatus, exit_code: int) -> UserError:
    """Return the error for a rank whose process ended without a message.

    Args:
        exit_code: as of subprocess: minus the signal, or the code.
    """
    where = _where(standing)
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        do = "out of memory? see the system's log" if name == "SIGKILL" else "see its output above"
        return UserError(310, f"was ended by {name} {where}, {_doing(standing)}", do, **_who(standing))
    return UserError(
        313, f"ended with exit code {exit_code} {where}, {_doing(standing)}", "see its output above", **_who(standing)
    )


def disagreement(standings: Sequence[RankStatus]) -> UserError | None:
    """Return the error for the first pair of ranks that began different operations under the same number."""
    for standing in standings:
        for mine in standing.operations:
            for other in mine.ranks:
                if other >= len(standings):
                    continue
                theirs = standings[other].on(mine.axis)
                if theirs.ranks == mine.ranks and theirs.number == mine.number and theirs.text != mine.text:
                    return _mismatch(standings, mine)
    return None


def stuck(standings: Sequence[RankStatus], rank: int) -> UserError:
    """Return why `rank`, which gave up in an operation, got no answer."""
    mine = _waits_in(standings[rank])
    assert mine is not None, "it gave up in an operation"
    found = disagreement(standings)
    if found is not None:
        return found
    culprit, waiter, operation, seen = rank, rank, mine, {rank}
    while operation is not None:
        late = [k for k in operation.ranks if k not in seen and _missing(standings, k, operation)]
        if not late:
            break
        mine, waiter, culprit = operation, culprit, late[0]
        seen.add(culprit)
        operation = _waits_in(standings[culprit]) if culprit < len(standings) else None
    if culprit == rank:  # all have begun it: whoever does not give up with the others is held up in it
        culprit = next((k for k in mine.ranks if k < len(standings) and standings[k].state == RUNNING), rank)
    if (stopped := _stopped(standings)) and culprit not in stopped:
        return _halt(standings[stopped[0]], f"rank {rank} waited in {mine}")
    blamed = standings[culprit]
    if culprit == rank:
        hosts = sorted({standings[k].host for k in mine.ranks if k < len(standings)} - {blamed.host})
        beyond = f" (others of it: {', '.join(hosts[:4])})" if hosts else ""
        what = f"lost its connection in {mine} {_where(blamed)}{beyond}"
        return UserError(314, what, "see the network and the other ranks' hosts", **_who(blamed))
    verb = "had ended and" if blamed.state in (DONE, FAILED) else "was not there and" if blamed.state == EMPTY else ""
    what = f"{verb} did not answer in {mine} {_where(blamed)}; {_waiting(standings, mine, waiter)}"
    return UserError(311, what, STOPPED if blamed.is_stopped else SLOW, **_who(blamed))


def held_up(standings: Sequence[RankStatus]) -> UserError | None:
    """Return why the ranks did not meet, if one of them is stopped, which the others could not know."""
    stopped = _stopped(standings)
    return _halt(standings[stopped[0]], "the others waited for it") if stopped else None


def waited_in_vain(failed: Sequence[RankStatus]) -> bool:
    """Return whether all of these ranks ended because another did not come, none for a reason of its own."""
    said = [standing for standing in failed if standing.state == STUCK or standing.has_said]
    quiet = all(standing.state in (STUCK, FAILED) for standing in failed)
    return quiet and bool(said) and all(s.state == STUCK or s.message.startswith("MZ-320 ") for s in said)


def _stopped(standings: Sequence[RankStatus]) -> list[int]:
    return [standing.rank for standing in standings if standing.state == RUNNING and standing.is_stopped]


def _halt(standing: RankStatus, waiting: str) -> UserError:
    return UserError(311, f"did not go on {_where(standing)}, {_doing(standing)}; {waiting}", STOPPED, **_who(standing))


def _waits_in(standing: RankStatus) -> Operation | None:
    if standing.state == STUCK:  # its message is the axis
        return standing.on(standing.message)
    return standing.open if standing.state == RUNNING else None


def _missing(standings: Sequence[RankStatus], rank: int, operation: Operation) -> bool:
    """Return whether a rank has not begun an operation that others wait in; a message is begun by its sender alone."""
    return (
        operation.axis == P2P or rank >= len(standings) or standings[rank].on(operation.axis).number < operation.number
    )


def _mismatch(standings: Sequence[RankStatus], mine: Operation) -> UserError:
    """Return the error that names the rank in the minority; of two, the higher one."""
    called = {k: standings[k].on(mine.axis) for k in mine.ranks if standings[k].on(mine.axis).number == mine.number}
    texts = [operation.text for operation in called.values()]
    odd = min(reversed(called), key=lambda k: texts.count(called[k].text))
    other = next(k for k in called if called[k].text != called[odd].text)
    what = f"called {called[odd]} where rank {other} called {called[other].text}"
    return UserError(312, what, "all ranks must run the same config on the same code", **_who(standings[odd]))


def _waiting(standings: Sequence[RankStatus], operation: Operation, waiter: int) -> str:
    if operation.axis == P2P:
        return f"rank {waiter} waited {_where(standings[waiter])}"
    ranks = [k for k in operation.ranks if k < len(standings) and not _missing(standings, k, operation)]
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} waited"


def _where(standing: RankStatus) -> str:
    place = f"on {standing.host} (pid {standing.pid})" if standing.pid else ""
    return f"in {standing.phase} {place}" if standing.phase else place


def _doing(standing: RankStatus) -> str:
    if standing.last is None:
        return "before any operation with others"
    return f"{'during' if standing.last.open else 'after'} {standing.last}"


def _who(standing: RankStatus) -> dict[str, Any]:
    return {"rank": standing.rank, "step": standing.step or None}
