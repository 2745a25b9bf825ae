"""Coordinate the ranks through the store, between the roll call and the first operation.

torch makes process groups by waiting for one key after the other, and says of a rank that does not come no more than
that some key was not set. So each rank reports here that it got through, or gave up; a rank that reports neither is to
blame, and the roll call has said where that rank is.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.processes import Process
from megazero.launch.attendance import Presence
from megazero.launch.diagnosis import SLOW, STOPPED
from megazero.store.client import NoAnswer

_SLACK = 1.0  # seconds that ranks may give up later than the first one
_SHORTEST, _SLICE = 0.02, 0.5  # seconds of one wait


@dataclass(frozen=True)
class Lobby:
    """The store and the roll of the ranks during start-up.

    Attributes:
        store: the store that all ranks reach; must live as long as torch's groups use it.
        rank: of this process.
        roll: all ranks, as they described themselves.
        timeout: seconds.
    """

    store: Store
    rank: int
    roll: Mapping[int, Presence]
    timeout: float

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Name the missing rank when an operation of all ranks, which waits for all, fails inside.

        Raises:
            UserError: 311, a rank did not do it in time; 320, it went wrong though all ranks came.
            FailedElsewhere: another rank reports it.
        """
        try:
            yield
            self.store.set(f"{what}/{self.rank}", "done")
        except UserError:
            raise
        except RuntimeError as error:  # all of torch's, and CollectiveError
            reason = " ".join(str(error).split())[:80]
            missing = [0] if isinstance(error, NoAnswer) else self._missing(what)  # rank 0 holds that store
            raise self._blamed(what, missing) or self._broken(what, reason) from None

    def _missing(self, what: str) -> list[int]:
        """Return the ranks that neither got through nor gave up within _SLACK seconds."""
        try:
            self.store.set(f"{what}/{self.rank}", "late")
            return absent(self.store, what, [rank for rank in self.roll if rank != self.rank], _SLACK)
        except NoAnswer:
            return [0]
        except dist.DistError:  # rank 0 has ended, and says why
            return []

    def _blamed(self, what: str, missing: Sequence[int]) -> UserError | None:
        """Return this rank's error if another rank is missing: the lowest rank that is present reports it."""
        if not missing:
            return None
        speaker = min(set(self.roll) - set(missing))
        if speaker != self.rank:
            return FailedElsewhere(speaker, 311)
        there = self.roll[missing[0]]
        here = there.host_id != "" and there.host_id == self.roll[self.rank].host_id
        stopped = here and Process(there.pid, there.started).is_stopped
        line = f"did not answer in the meeting ({what}) in start on {there.host} (pid {there.pid})"
        return UserError(311, f"{line}; rank {speaker} waited", STOPPED if stopped else SLOW, rank=missing[0])

    def _broken(self, what: str, reason: str) -> UserError:
        if self.rank:
            return FailedElsewhere(0, 320)
        return UserError(320, f"{what}: {reason}", "see the network between the ranks' hosts", rank=0)


def absent(store: Store, key: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait until each of `ranks` has set its `key`; return those that have not in time."""
    deadline, names = time.monotonic() + seconds, [f"{key}/{rank}" for rank in ranks]
    while names:
        left = deadline - time.monotonic()
        try:
            # The store answers when all are there; in slices, so that a signal is noted meanwhile.
            store.wait(names, timedelta(seconds=min(max(left, _SHORTEST), _SLICE)))
            break
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a slice is over: torch's stores have different words for it
            if left <= 0:
                return [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
    return []
