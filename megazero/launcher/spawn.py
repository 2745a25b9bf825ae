"""Start the local ranks from one parent, watch them, and leave no process behind.

The parent forks after torch is imported and before anything is computed, so ranks start in a moment. It computes
nothing itself. It ends all ranks when one fails, says once why (`diagnosis.py`), and forwards the signals that a
run handles. Each rank dies with the parent, whatever kills it: on Linux the kernel ensures that, elsewhere a thread of
the rank.
"""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megazero.base.heartbeat import HEART
from megazero.base.stop_signals import NOTED, REQUEUE
from megazero.comm.status_board import BUILD, DONE, START, STOPPED, STUCK, RankStatus, StatusBoard
from megazero.launcher.diagnosis import death, disagreement, held_up, stuck, waited_in_vain
from megazero.launcher.environment import RankContext, World, host_name, threads_for
from megazero.launcher.exit_status import flush_output, outcome
from megazero.launcher.scratch import scratch_folder
from megazero.launcher.signals import TWICE, noted
from megazero.launcher.stacks import ask_for_stacks

_POLL = 0.02  # seconds between looks at the ranks
_GRACE = 1.0  # seconds that ranks have to say what happened after the first one ended
_EARLY = 0.5  # seconds that ranks have to end by themselves when a signal comes before the first step
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


@dataclass
class _Ranks:
    """The rank processes: which live, how the others ended, which signal was forwarded."""

    pids: dict[int, int]
    ended: dict[int, int] = field(default_factory=dict)
    signalled: int | None = None
    since: float = math.inf  # when the first signal was passed on
    interrupted: float = math.inf  # when the first SIGINT came
    impatient: bool = False

    def look(self) -> None:
        for rank, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.pids[rank]
                self.ended[rank] = os.waitstatus_to_exitcode(status)

    def send(self, number: int) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):  # it was seen to end, and not yet struck off
                os.kill(pid, number)

    def pass_on(self, number: int, _: object) -> None:
        """Forward a signal of the parent to all ranks; the second interruption kills them."""
        now = time.monotonic()
        if number == signal.SIGINT:
            self.impatient = now - self.interrupted > TWICE
            self.interrupted = min(self.interrupted, now)
        self.signalled = number
        self.since = min(self.since, now)
        self.send(signal.SIGKILL if self.impatient else number)


def run_local(
    size: int,
    main: Callable[[RankContext], int | None],
    clean_up: Callable[[Sequence[RankStatus], str], None],
    *,
    stopped: Callable[[int, Sequence[RankStatus]], int] | None = None,
    shares_gpus: bool = False,
    signalled: Callable[[int], object] = lambda number: None,
) -> int:
    """Run `main` as ranks 0 to size - 1 of this machine; return the exit code of the whole.

    It is what `main` returned, where it did on all ranks; else that of the first failing one, 128 + n after signal n.
    The fault is one line on stderr.

    Args:
        clean_up: called after a failure with the status of all ranks and the line, once none of them is left.
        stopped: if given, `main` checks its context's signals, and ends when it is asked to; rank 0 has the heartbeat.
            Called with the signal and the status of all ranks when it came before `main` trained, once none of them is
            left; returns the exit code, and may raise. None: a signal ends `main`, and the heartbeat stays here.
        shares_gpus: see `World`.
        signalled: called with a signal that was forwarded, however the ranks ended, when none is left; may raise.
    """
    HEART.pause()
    sys.stdout.flush()
    sys.stderr.flush()
    board = StatusBoard.private(size)
    with scratch_folder() as folder:
        store = folder / "store"
        ranks = _Ranks({})
        before = {number: signal.signal(number, ranks.pass_on) for number in noted()}
        try:
            parent = os.getpid()
            # No rank misses a signal because it is not there yet, nor handles it with the parent's handler.
            signal.pthread_sigmask(signal.SIG_BLOCK, NOTED)
            for rank in range(size):
                pid = os.fork()
                if not pid:
                    place = RankContext(World(rank, size, rank, "local", shares_gpus), board.status_slot(rank), store)
                    _be(place, main, parent, notes_signals=stopped is not None)
                ranks.pids[rank] = pid
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTED)
            if stopped is None:
                HEART.resume()
            early = _watch(ranks, board, early=stopped is not None)
            code, line = (REQUEUE, "") if early else _verdict(ranks, board)
        finally:
            ranks.send(signal.SIGKILL)
            while ranks.pids:
                ranks.look()
                time.sleep(_POLL if ranks.pids else 0)
            for number, handler in before.items():
                signal.signal(number, handler)
        if early and stopped is not None and ranks.signalled is not None:
            return stopped(ranks.signalled, board.read_all())
        if ranks.signalled is not None:
            signalled(ranks.signalled)
        if line:
            with HEART.paused():
                print(line, file=sys.stderr, flush=True)
            clean_up(board.read_all(), line)
        return code


def _be(place: RankContext, main: Callable[[RankContext], int | None], parent: int, *, notes_signals: bool) -> None:
    """Run a rank's process from its fork to its end; does not return."""
    code = 1
    try:
        _die_with(parent)
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the parent, which passes it on
        for number in noted():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if notes_signals:
            place.signals.note()
        place.status_slot.take(host_name())
        threads = threads_for(place.world.size)
        if threads is not None:
            torch.set_num_threads(threads)
        code = outcome(lambda: _unblocked(main, place, speaks=notes_signals and place.world.rank == 0), place)
        HEART.end()
        flush_output()
    finally:
        os._exit(code)  # the parent's exit handlers, and the process group's last words, are not for this process


def _unblocked(main: Callable[[RankContext], int | None], place: RankContext, *, speaks: bool) -> int | None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTED)  # from here on one that comes is this rank's outcome
    if speaks:
        HEART.resume()
    else:
        HEART.end()
    return main(place)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _watch(ranks: _Ranks, board: StatusBoard, *, early: bool) -> bool:
    """Wait for all ranks, or for the first failure and for the others to report on it.

    Args:
        early: check whether a signal ends the ranks before they train.

    Returns:
        True if one does.
    """
    first: float | None = None
    while ranks.pids:
        ranks.look()
        if early and _ends_early(ranks, board):
            return True
        failed = [rank for rank in ranks.ended if board.read(rank).state != DONE]
        if failed and first is None:
            first = time.monotonic()
        if first is not None:
            known = any(ranks.ended[rank] < 0 or board.read(rank).has_said for rank in failed)
            if known or time.monotonic() - first > _GRACE:
                break
        time.sleep(_POLL)
    return early and _ends_early(ranks, board)


def _ends_early(ranks: _Ranks, board: StatusBoard) -> bool:
    """Return whether a signal has come before the ranks train, to this process or to a rank, and they have had time.

    One rank may have got it, while the others wait for that rank where no signal reaches them (in a library), or build
    something large: the signal is sent to them too, and they get _EARLY seconds to end.
    """
    statuses = board.read_all()
    stopped = any(status.state == STOPPED for status in statuses)
    if stopped and ranks.signalled is None:
        ranks.pass_on(signal.SIGTERM if (number := _signal_of(statuses)) is None else number, None)
    if ranks.signalled is None or ranks.impatient:
        return False
    waited = not ranks.pids or time.monotonic() - ranks.since > _EARLY
    builds = all(status.phase in ("", START, BUILD) for status in statuses if status.rank in ranks.pids)
    return waited and (stopped or (builds and bool(ranks.pids)))


def _signal_of(statuses: Sequence[RankStatus]) -> int | None:
    """Return the signal that a rank reports to have stopped it."""
    said = next((status.message for status in statuses if status.state == STOPPED), "")
    return int(said) if said.isdecimal() else None


def _verdict(ranks: _Ranks, board: StatusBoard) -> tuple[int, str]:
    """Return the exit code of the run, and in one line the fault, if there was any."""
    statuses = board.read_all()
    failed = sorted(rank for rank in ranks.ended if statuses[rank].state != DONE)
    if not failed:
        return max(ranks.ended.values()), ""
    if ranks.signalled is not None and (
        ranks.impatient or {-ranks.signalled, 128 + ranks.signalled} & set(ranks.ended.values())
    ):
        name = signal.Signals(ranks.signalled).name
        return 128 + ranks.signalled, "interrupted" if ranks.signalled == signal.SIGINT else f"ended by {name}"
    if waited_in_vain([statuses[rank] for rank in failed]):
        ask_for_stacks(statuses)
        if all(statuses[rank].state != STUCK for rank in failed) and (error := held_up(statuses)):
            return error.exit_code, str(error)
    for rank in failed:
        if statuses[rank].has_said:
            return ranks.ended[rank], statuses[rank].message
    for rank in failed:
        if ranks.ended[rank] < 0 or statuses[rank].state != STUCK:
            # torch ends a process whose message has another length than expected; then the ranks disagree
            error = disagreement(statuses) or death(statuses[rank], ranks.ended[rank])
            break
    else:
        error = stuck(statuses, failed[0])
    return error.exit_code, str(error)
