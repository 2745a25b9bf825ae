"""Find the rank at fault from the status of all ranks, and report the rank and its operation in one line.

The rank that reports a failure is rarely the one at fault. It waits in an operation. A rank of that operation that has
not begun it either waits in another operation, which is examined next, or in none: there the chain ends. If all ranks
have begun the operation, one that has not given up is blocked in it. A stopped process of this host, which the system
reports, is at fault wherever the chain ends. Ranks that began different operations under the same number disagree, and
no waiting resolves that.
"""

import resource
import signal
from collections.abc import Sequence
from typing import Any

from megazero.base.errors import UserError
from megazero.comm.axes import P2P
from megazero.comm.status_board import DONE, EMPTY, FAILED, ON_DEVICE, RUNNING, STUCK, Operation, RankStatus

SLOW = "stopped, slow or cut off? raise parallel.timeout for long operations"
STOPPED = "it is stopped (SIGSTOP, a debugger?): continue or end it"


def death(status: RankStatus, exit_code: int) -> UserError:
    """Return the error for a rank whose process ended without a message.

    Args:
        exit_code: as in subprocess: the code, or minus the signal.
    """
    where, do = f"{_where(status)}, {_doing(status)}", "see its output above"
    if exit_code >= 0:
        return UserError(313, f"ended with exit code {exit_code} {where}", do, **_who(status))
    name = signal.Signals(-exit_code).name
    do = "out of memory? see the system's log" if name == "SIGKILL" else do
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:  # ranks inherit it
        do = f"its address space is limited to {space >> 20:,} MB: raise `ulimit -v`, or {do}"
    return UserError(310, f"was ended by {name} {where}", do, **_who(status))


def disagreement(statuses: Sequence[RankStatus]) -> UserError | None:
    """Return the error for the first pair of ranks that began different operations under the same number."""
    texts: dict[tuple[str, range, int], str] = {}
    for status in statuses:
        for mine in status.operations:  # each rank has its own numbers for messages
            if mine.axis != P2P and texts.setdefault((mine.axis, mine.ranks, mine.number), mine.text) != mine.text:
                return _mismatch(statuses, mine)
    return None


def stuck(statuses: Sequence[RankStatus], rank: int) -> UserError:
    """Return the error that explains why `rank`, which gave up in an operation, got no answer."""
    found = disagreement(statuses)
    if found is not None:
        return found
    if statuses[rank].message == ON_DEVICE:
        return _stuck_on_device(statuses, rank)
    mine = _waits_in(statuses[rank])
    assert mine is not None, "it gave up in an operation"
    culprit, waiter, operation, seen = rank, rank, mine, {rank}
    while operation is not None:
        late = [k for k in operation.ranks if k not in seen and _missing(statuses, k, operation)]
        if not late:
            break
        mine, waiter, culprit = operation, culprit, late[0]
        seen.add(culprit)
        operation = _waits_in(statuses[culprit]) if culprit < len(statuses) else None
    if culprit == rank:  # all have begun it: a rank that does not give up with the others is blocked in it
        culprit = next((k for k in mine.ranks if k < len(statuses) and statuses[k].state == RUNNING), rank)
    stopped = [status for status in statuses if status.state == RUNNING and status.is_stopped]
    blamed = statuses[culprit]
    if stopped and blamed not in stopped:
        what = f"made no progress {_where(stopped[0])}, {_doing(stopped[0])}; rank {rank} waited in {mine}"
        return UserError(311, what, STOPPED, **_who(stopped[0]))
    return _lost(statuses, blamed, mine) if culprit == rank else _no_answer(statuses, blamed, mine, waiter)


def _stuck_on_device(statuses: Sequence[RankStatus], rank: int) -> UserError:
    """Return the error that explains why the GPUs are stuck, starting from a rank whose GPU is.

    A host runs ahead of its GPU, so a rank that has begun an operation may not have taken part in it. But a rank with
    nothing unfinished is one that all others wait for, because they have queued whatever it has queued. So a rank of
    an unfinished operation that is not stuck itself is blamed first, then a rank that is late.
    """
    newest = dict[tuple[str, range], tuple[int, Operation]]()  # the waiting rank and its operation, by group of ranks
    for status in statuses:
        for operation in status.operations if status.state == STUCK else ():
            before = newest.get((operation.axis, operation.ranks))
            if operation.open and (before is None or before[1].number < operation.number):
                newest[operation.axis, operation.ranks] = status.rank, operation
    waits = [(k, *wait) for wait in newest.values() for k in wait[1].ranks if k != wait[0] and k < len(statuses)]
    found = [wait for wait in waits if statuses[wait[0]].state != STUCK]
    found = found or [wait for wait in waits if wait[2].axis != P2P and _missing(statuses, wait[0], wait[2])]
    if found:
        first = min(found, key=lambda one: (not statuses[one[0]].is_stopped, not _missing(statuses, one[0], one[2])))
        culprit, waiter, operation = first
        return _no_answer(statuses, statuses[culprit], operation, waiter)
    mine = statuses[rank].open
    assert mine is not None, "it is stuck in an operation"
    return _lost(statuses, statuses[rank], mine)


def _lost(statuses: Sequence[RankStatus], blamed: RankStatus, mine: Operation) -> UserError:
    """Return the error for an operation that all ranks have begun, and that has not ended."""
    hosts = sorted({statuses[k].host for k in mine.ranks if k < len(statuses)} - {blamed.host})
    beyond = f" (other hosts: {', '.join(hosts[:4])})" if hosts else ""
    reason = " ".join(blamed.message.partition(": ")[2].split())[:80] if blamed.state == STUCK else ""
    what = f"lost its connection in {mine} {_where(blamed)}{beyond}" + (reason and f" ({reason})")
    return UserError(314, what, "check the network and the other ranks' hosts", **_who(blamed))


def _no_answer(statuses: Sequence[RankStatus], blamed: RankStatus, mine: Operation, waiter: int) -> UserError:
    """Return the error for a rank that others waited for in an operation."""
    verb = "had ended and" if blamed.state in (DONE, FAILED) else "had not started and" if blamed.state == EMPTY else ""
    what = f"{verb} did not answer in {mine} {_where(blamed)}; {_waiting(statuses, mine, waiter)}"
    return UserError(311, what, STOPPED if blamed.is_stopped else SLOW, **_who(blamed))


def _waits_in(status: RankStatus) -> Operation | None:
    if status.state == STUCK and status.message != ON_DEVICE:  # its message begins with the axis
        return status.on(status.message.partition(" ")[0])
    return status.open if status.state in (RUNNING, STUCK) else None


def _missing(statuses: Sequence[RankStatus], rank: int, operation: Operation) -> bool:
    """Return whether a rank has not begun an operation. True for messages, which only their senders begin."""
    return operation.axis == P2P or rank >= len(statuses) or statuses[rank].on(operation.axis).number < operation.number


def _mismatch(statuses: Sequence[RankStatus], mine: Operation) -> UserError:
    """Return the error that names the rank in the minority; of two, the higher one."""
    called = {k: statuses[k].on(mine.axis) for k in mine.ranks if statuses[k].on(mine.axis).number == mine.number}
    texts = [operation.text for operation in called.values()]
    odd = min(reversed(called), key=lambda k: texts.count(called[k].text))
    other = next(k for k in called if called[k].text != called[odd].text)
    what = f"called {called[odd]} where rank {other} called {called[other].text}"
    return UserError(312, what, "all ranks must run the same config on the same code", **_who(statuses[odd]))


def _waiting(statuses: Sequence[RankStatus], operation: Operation, waiter: int) -> str:
    if operation.axis == P2P:
        return f"rank {waiter} waited {_where(statuses[waiter])}"
    ranks = [k for k in operation.ranks if k < len(statuses) and not _missing(statuses, k, operation)]
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} waited"


def _where(status: RankStatus) -> str:
    place = f"on {status.host} (pid {status.pid})" if status.pid else ""
    return f"in {status.phase} {place}" if status.phase else place


def _doing(status: RankStatus) -> str:
    if status.last is None:
        return "before any operation with other ranks"
    return f"{'during' if status.last.open else 'after'} {status.last}"


def _who(status: RankStatus) -> dict[str, Any]:
    return {"rank": status.rank, "step": status.step or None}
