"""Coordinate the ranks through the store, between the roll call and the first operation.

torch makes process groups by waiting for one key after the other, and says of a rank that does not come no more than
that some key was not set. So each rank reports here that it got through, or gave up; a rank that reports neither is to
blame, and the roll call has said where that rank is.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.processes import Process
from megazero.launcher.attendance import Presence
from megazero.launcher.diagnosis import SLOW, STOPPED
from megazero.launcher.roll_call import absent, came, elected
from megazero.store.client import NoAnswer

_SLACK = 1.0  # seconds that ranks may give up later than the first one
_BETWEEN = 0.1  # seconds between two looks at the store


@dataclass(frozen=True)
class Lobby:
    """The store and the roll of the ranks during start-up.

    Attributes:
        store: the store that all ranks reach; must live as long as torch's groups use it.
        rank: of this process.
        roll: all ranks, as they described themselves.
    """

    store: Store
    rank: int
    roll: Mapping[int, Presence]

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
            # Rank 0 holds that store; nobody can be elected without it.
            speaker, missing = (1, [0]) if isinstance(error, NoAnswer) else self._missing(what)
            if speaker != self.rank:
                raise FailedElsewhere(speaker, 311) from None
            raise self._blamed(what, missing[0]) if missing else self._broken(what, reason) from None

    def _missing(self, what: str) -> tuple[int, list[int]]:
        """Return which rank speaks, and to that one the ranks that neither got through nor gave up in time.

        One rank alone looks for them; the others stay until it has: a launcher may end all ranks with the first one.
        """
        try:
            self.store.set(f"{what}/{self.rank}", "late")
            speaker = elected(self.store, f"{what}/speaker", self.rank)
            if speaker != self.rank:
                came(self.store, f"{what}/found", 2 * _SLACK)
                return speaker, []
            deadline = time.monotonic() + _SLACK
            while (missing := absent(self.store, what, list(self.roll))) and time.monotonic() < deadline:
                time.sleep(_BETWEEN)
            self.store.set(f"{what}/found", "")
            return speaker, missing
        except NoAnswer:
            return 1, [0]
        except dist.DistError:  # rank 0 has ended, and says why
            return 0, []

    def _blamed(self, what: str, missing: int) -> UserError:
        there = self.roll[missing]
        here = there.host_id != "" and there.host_id == self.roll[self.rank].host_id
        stopped = here and Process(there.pid, there.started).is_stopped
        line = f"did not answer in the meeting ({what}) in start on {there.host} (pid {there.pid})"
        return UserError(311, f"{line}; rank {self.rank} waited", STOPPED if stopped else SLOW, rank=missing)

    def _broken(self, what: str, reason: str) -> UserError:
        return UserError(320, f"{what}: {reason}", "see the network between the ranks' hosts", rank=self.rank)
