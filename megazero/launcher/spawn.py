"""Start the local ranks from one parent, watch them, and leave no process behind.

The parent forks after torch is imported and before anything is computed, so ranks start quickly. It computes
nothing itself. It ends all ranks when one fails, reports once why (`diagnosis.py`), and forwards the signals that a run
handles. The kernel kills the ranks when the parent ends, for whatever reason.
"""

import contextlib
import ctypes
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megazero.base.answers import flush_output, tell
from megazero.base.heartbeat import HEART
from megazero.base.stop_signals import NOTED, REQUEUE, ended_by, handle, restore
from megazero.comm.status_board import BUILD, DONE, START, STOPPED, STUCK, RankStatus, StatusBoard
from megazero.launcher.diagnosis import death, disagreement, stuck
from megazero.launcher.environment import RankContext, host_name, threads_for
from megazero.launcher.exit_status import outcome
from megazero.launcher.signals import TWICE
from megazero.launcher.stacks import ASK
from megazero.launcher.world import World

_POLL = 0.02  # seconds between looks at the ranks
_GRACE = 1.0  # seconds that ranks have to report what happened after the first one ended
_EARLY = 0.5  # seconds that ranks have to end by themselves when a signal comes before the first step
_WRITING = 0.5  # seconds that ranks have to write their stacks
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def run_local(
    size: int,
    main: Callable[[RankContext], int | None],
    clean_up: Callable[[Sequence[RankStatus], str], None],
    *,
    stopped: Callable[[int, Sequence[RankStatus]], int] | None = None,
    shares_gpus: bool = False,
    signalled: Callable[[int], object] = lambda number: None,
) -> int:
    """Run `main` as ranks 0 to size - 1 of this machine; return the exit code of the run.

    If `main` returned on all ranks, it is the largest of their codes; else that of the first failing rank, or 128 + n
    after signal n. A fault is reported in one line on stderr.

    Args:
        clean_up: called after a failure with the status of all ranks and the line, once all ranks have ended.
        stopped: if given, `main` checks its context's signals and ends when asked to; rank 0 has the heartbeat. After
            a signal before `main` trained, it is called with the signal and the status of all ranks, once all ranks
            have ended; it returns the exit code, and may raise. None: a signal ends `main`; the heartbeat stays here.
        shares_gpus: see `World`.
        signalled: called with a forwarded signal once all ranks have ended, however they ended; may raise.
    """
    HEART.pause()
    sys.stdout.flush()
    sys.stderr.flush()
    board, early = StatusBoard(size), False
    ranks = _Ranks(board)
    before = handle(ranks.pass_on)
    with tempfile.TemporaryDirectory(prefix="megazero-", ignore_cleanup_errors=True) as folder:
        try:
            # Blocked here: a rank must not miss a signal that comes before its start, nor run the parent's handler.
            signal.pthread_sigmask(signal.SIG_BLOCK, NOTED)
            for rank in range(size):
                parent, pid = os.getpid(), os.fork()
                if not pid:
                    world, store = World(rank, size, rank, "local", shares_gpus), Path(folder) / "store"
                    _be(RankContext(world, board.status_slot(rank), store), main, parent, trains=stopped is not None)
                ranks.pids[rank] = pid
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTED)
            if stopped is None:
                HEART.resume()
            early = ranks.watch(trains=stopped is not None)
            code, line = (REQUEUE, "") if early else ranks.verdict()
        finally:
            ranks.kill()
            restore(before)
    if ranks.signalled is not None:
        if early and stopped is not None:
            return stopped(ranks.signalled, board.read_all())
        signalled(ranks.signalled)
    if line:
        tell(line)
        clean_up(board.read_all(), line)
    return code


class _Ranks:
    """The rank processes, as their parent watches them.

    Attributes:
        pids: process ids of the ranks that are alive.
        ended: exit codes of the others, as in subprocess.
        signalled: the signal that was forwarded last.
    """

    def __init__(self, board: StatusBoard):
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.signalled: int | None = None
        self._board = board
        self._since = math.inf  # when the first signal was passed on
        self._interrupted = math.inf  # when the first SIGINT came
        self._impatient = False

    def pass_on(self, number: int, _: object) -> None:
        """Forward a signal of the parent to all ranks; the second interruption kills them."""
        now = time.monotonic()
        if number == signal.SIGINT:
            self._impatient = now - self._interrupted > TWICE
            self._interrupted = min(self._interrupted, now)
        self.signalled, self._since = number, min(self._since, now)
        self._send(signal.SIGKILL if self._impatient else number)

    def watch(self, *, trains: bool) -> bool:
        """Wait for all ranks, or for the first failure and for the others to report on it.

        Args:
            trains: whether a signal before the first step ends the ranks.

        Returns:
            True if such a signal ended them.
        """
        first = math.inf  # when the first failure was seen
        while self.pids:
            self._look()
            if trains and self._ends_early():
                return True
            failed = [rank for rank in self.ended if self._board.read(rank).state != DONE]
            if failed:
                first = min(first, time.monotonic())
                known = any(self.ended[rank] < 0 or self._board.read(rank).has_said for rank in failed)
                if known or time.monotonic() - first > _GRACE:
                    break
            time.sleep(_POLL)
        return trains and self._ends_early()

    def verdict(self) -> tuple[int, str]:
        """Return the exit code of the run, and the fault in one line, "" if there was none."""
        statuses = self._board.read_all()
        failed = sorted(rank for rank in self.ended if statuses[rank].state != DONE)
        if not failed:
            return max(self.ended.values()), ""
        if self.signalled is not None and (
            self._impatient or {-self.signalled, 128 + self.signalled} & set(self.ended.values())
        ):
            return 128 + self.signalled, ended_by(self.signalled)
        if said := [rank for rank in failed if statuses[rank].has_said]:
            return self.ended[said[0]], statuses[said[0]].message
        if died := [rank for rank in failed if self.ended[rank] < 0 or statuses[rank].state != STUCK]:
            # torch ends a process whose message has another length than expected; then the ranks disagree
            error = disagreement(statuses) or death(statuses[died[0]], self.ended[died[0]])
        else:
            self._send(ASK)
            time.sleep(_WRITING if self.pids else 0.0)
            error = stuck(statuses, failed[0])
        return error.exit_code, str(error)

    def kill(self) -> None:
        """Kill the remaining ranks, and wait until all have ended."""
        self._send(signal.SIGKILL)
        while self.pids:
            self._look()
            time.sleep(_POLL if self.pids else 0)

    def _look(self) -> None:
        for rank, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.pids[rank]
                self.ended[rank] = os.waitstatus_to_exitcode(status)

    def _send(self, number: int) -> None:
        for pid in list(self.pids.values()):
            with contextlib.suppress(ProcessLookupError):  # it has ended, and is not removed yet
                os.kill(pid, number)

    def _ends_early(self) -> bool:
        """Return whether this process or a rank got a signal before the ranks train, and they had time to end.

        If one rank got it, the others may wait for that rank inside a library, where they handle no signal, or build
        something large: the signal is sent to them too, and they get _EARLY seconds to end.
        """
        statuses = self._board.read_all()
        stopped = [status for status in statuses if status.state == STOPPED]
        if stopped and self.signalled is None:
            self.pass_on(int(stopped[0].message or signal.SIGTERM), None)
        if self.signalled is None or self._impatient:
            return False
        waited = not self.pids or time.monotonic() - self._since > _EARLY
        builds = all(status.phase in ("", START, BUILD) for status in statuses if status.rank in self.pids)
        return waited and (bool(stopped) or (builds and bool(self.pids)))


def _be(place: RankContext, main: Callable[[RankContext], int | None], parent: int, *, trains: bool) -> None:
    """Run a rank's process from its fork to its end; does not return."""
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the parent, which passes it on
        handle(signal.SIG_DFL)
        signal.signal(ASK, signal.SIG_IGN)  # until there is a log to write stacks to
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if trains:
            place.signals.note()
        place.status_slot.take(host_name())
        threads = threads_for(place.world.size)
        if threads is not None:
            torch.set_num_threads(threads)

        def unblocked() -> int | None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTED)  # a later signal is this rank's outcome
            if trains and place.world.rank == 0:
                HEART.resume()
            else:
                HEART.end()
            return main(place)

        code = outcome(unblocked, place)
        HEART.end()
        flush_output()
    finally:
        os._exit(code)  # without the parent's exit handlers, and messages of the process group at exit
