"""Record how a rank ends, and report why.

A rank records in its status slot how it ended. A local parent reads the slots and prints one line (`spawn.py`). Ranks
that torchrun or srun started have no such parent: of those with the same message, the first prints it (`job_board.py`).
"""

import signal
import time
import traceback
from collections.abc import Callable

from megazero.base.answers import tell
from megazero.base.errors import FailedElsewhere, UserError
from megazero.base.stop_signals import REQUEUE
from megazero.comm.collectives import CollectiveError
from megazero.comm.status_board import DONE, FAILED, STOPPED, STUCK, RankStatus
from megazero.launcher.diagnosis import stuck
from megazero.launcher.environment import RankContext
from megazero.launcher.job_board import JobBoard
from megazero.launcher.meeting import SLACK
from megazero.launcher.signals import StoppedEarly
from megazero.launcher.store import deadline

_GRACE = 1.0  # seconds for the other ranks to publish how they ended


def outcome(main: Callable[[], int | None], place: RankContext) -> int:
    """Run a rank's `main` and record how it ended; return the exit code, main's own (None is 0) if it returned."""
    status_slot, rank = place.status_slot, place.world.rank
    try:
        code = main()
    except CollectiveError as error:
        status_slot.set_state(STUCK, str(error))
        place.stacks.write(error)
        return 1
    except FailedElsewhere as error:
        status_slot.set_state(FAILED)
        return error.exit_code
    except UserError as error:
        where = status_slot.read()
        status_slot.set_state(FAILED, str(error.located(rank, where.step or None, where.place)))
        return error.exit_code
    except StoppedEarly as stop:
        status_slot.set_state(STOPPED, str(int(stop.number)))
        return REQUEUE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        what = "a fault of megazero's own, see the traceback above"
        status_slot.set_state(FAILED, str(UserError(390, what, rank=rank, step=status_slot.read().step or None)))
        return 1
    status_slot.set_state(DONE)
    return code or 0


def say_why(place: RankContext) -> None:
    """Print why the run failed, if this rank knows it and no other prints it; a local parent prints it itself."""
    own, board = place.status_slot.read(), place.status_slot.board
    if place.world.launcher == "local":
        return
    if not isinstance(board, JobBoard):  # it did not connect to the others
        if own.state == FAILED and own.message:
            tell(own.message)
    elif own.state in (FAILED, STUCK):
        with deadline(3 * _GRACE + SLACK, lambda: _say_alone(board, place.world.rank)):
            try:
                _say_once(board, place.world.rank)
            except RuntimeError:  # the store has ended with rank 0
                _say_alone(board, place.world.rank, ended=True)


def _say_once(board: JobBoard, rank: int) -> None:
    """Print why this rank failed, unless another rank prints it. Raises RuntimeError: the store has ended."""
    own = board.read(rank)
    board.raise_alarm()
    if own.state == FAILED:
        if own.message and board.is_first(own.message):
            tell(own.message)
    elif board.is_first("stuck"):
        _say_stuck(board.gather(_GRACE))
    else:
        time.sleep(_GRACE)
    time.sleep(_GRACE)  # for the others: a launcher may end all ranks with the first, and the store ends with rank 0


def _say_alone(board: JobBoard, rank: int, *, ended: bool = False) -> None:
    """Print the fault without the store; of a host's stuck ranks, only the first that is not rank 0 prints it.

    `ended`: rank 0 has ended, and the store with it.
    """
    own = board.read(rank)
    if own.state == FAILED and own.message:
        tell(own.message)
    elif own.state == STUCK and not board.has_heard and rank == next((other for other in board.here if other), rank):
        _say_stuck(board.known(ended=ended).read_all())


def _say_stuck(statuses: list[RankStatus]) -> None:
    if not any(other.has_said for other in statuses):  # a rank that failed prints why
        tell(stuck(statuses, next(other.rank for other in statuses if other.state == STUCK)))
