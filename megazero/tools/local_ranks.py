"""Run the work of a command on ranks of this machine."""

from collections.abc import Callable
from datetime import timedelta

from megazero.base.stop_signals import end_by
from megazero.comm.context import CommContext
from megazero.launcher.environment import RankContext
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.spawn import run_local
from megazero.launcher.world import World

_TIMEOUT = timedelta(seconds=120)


def on_ranks(nproc: int, work: Callable[[CommContext, World], object]) -> int:
    """Call `work` on each of `nproc` ranks, one in this process; return the exit code."""
    if nproc == 1:
        work(CommContext(), World(0, 1, 0))
        return 0

    def be(place: RankContext) -> None:
        work(connect(place, timeout=_TIMEOUT, fingerprint=""), place.world)
        disconnect()

    return run_local(nproc, be, lambda _, line: None, signalled=end_by)
