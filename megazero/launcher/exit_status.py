"""Record how a rank ends, and report why.

A rank records in its status slot how it ended. A local parent reads the slots and prints one line (`spawn.py`). Ranks
that torchrun or srun started have no such parent: the first of those with the same to say prints it (`job_board.py`).
"""

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from megazero.base.errors import FailedElsewhere, UserError
from megazero.base.heartbeat import HEART
from megazero.base.stop_signals import REQUEUE
from megazero.comm.collectives import CollectiveError
from megazero.comm.status_board import DONE, FAILED, STOPPED, STUCK, RankStatus
from megazero.launcher.diagnosis import stuck
from megazero.launcher.environment import RankContext
from megazero.launcher.job_board import JobBoard
from megazero.launcher.signals import StoppedEarly
from megazero.launcher.stacks import ask_for_stacks

_GRACE = 1.0  # seconds for the other ranks to put down how they ended


def outcome(main: Callable[[], int | None], place: RankContext) -> int:
    """Run a rank's `main` and record how it ended; return the exit code, main's own (None is 0) if it returned."""
    status_slot, rank = place.status_slot, place.world.rank
    try:
        code = main()
    except CollectiveError as error:
        status_slot.set_state(STUCK, error.axis)
        place.stacks.write(error)
        return 1
    except FailedElsewhere as error:
        status_slot.set_state(FAILED)
        return error.exit_code
    except UserError as error:
        status_slot.set_state(FAILED, str(error.located(rank, status_slot.step or None, status_slot.place)))
        return error.exit_code
    except StoppedEarly as stop:
        status_slot.set_state(STOPPED, str(int(stop.number)))
        return REQUEUE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        what = "a fault of megazero's own, see the traceback above"
        status_slot.set_state(FAILED, str(UserError(390, what, rank=rank, step=status_slot.step or None)))
        return 1
    status_slot.set_state(DONE)
    return code or 0


def say_why(place: RankContext) -> None:
    """Print why the run failed, if this rank knows it and no other says the same. For ranks without a parent."""
    rank, own = place.world.rank, place.status_slot
    if own.state not in (FAILED, STUCK):
        return
    board = own.board
    if not isinstance(board, JobBoard):  # it did not meet the others
        _print(own.message if own.state == FAILED else "")
        return
    board.raise_alarm()
    time.sleep(_GRACE)
    statuses = board.read_all()
    if rank == first_here(statuses):
        ask_for_stacks(statuses)
    if own.state == FAILED:
        if own.message and board.is_first(own.message):
            _print(own.message)
    elif board.is_first("stuck"):
        _print(_line(board.gather()))
        board.tell()
    else:
        board.until_told()


def flush_output() -> None:
    """Write out what was printed; before an end that skips the interpreter's own."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads
            stream.flush()


def _print(line: str) -> None:
    if line:
        with HEART.paused():
            print(line, file=sys.stderr, flush=True)


def first_here(statuses: Sequence[RankStatus]) -> int | None:
    """Return the first rank of this host that gave up."""
    return next((s.rank for s in statuses if s.state == STUCK and s.process is not None), None)


def _line(statuses: list[RankStatus]) -> str:
    if any(other.has_said for other in statuses):
        return ""  # whoever failed says why
    first = next(other.rank for other in statuses if other.state == STUCK)
    return str(stuck(statuses, first))
