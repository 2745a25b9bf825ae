"""Share the status of all ranks of a job without a common parent, once one of them fails.

Before a failure each rank keeps its operations in its own memory (`comm/status_board.py`), and nothing is sent. A rank
that fails raises an alarm in the store. Then each rank publishes its slot there, and one rank reads them all. If a rank
publishes nothing, its host and process are known from the roll call.
"""

import threading
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megazero.comm.status_board import FAILED, RUNNING, RankStatus, StatusBoard
from megazero.launcher.meeting import Presence
from megazero.launcher.stacks import Stacks
from megazero.launcher.store import until

_ALARM = "alarm"
_WAITING = timedelta(days=20)  # of one wait, after which torch logs a warning


class JobBoard(StatusBoard):
    """The board of one rank, with access to those of the others.

    Args:
        store: the store of all ranks.
        rank: this process' rank.
        roll: the descriptions of all ranks.

    Attributes:
        here: the ranks of this host.
        has_heard: whether another rank has failed, and prints why.
    """

    def __init__(self, store: Store, rank: int, roll: Sequence[Presence]):
        super().__init__(len(roll))
        self.here = [other for other, there in enumerate(roll) if there.host_id == roll[rank].host_id]
        self.has_heard = False
        self._store, self._rank, self._roll = store, rank, roll

    def listen(self, stacks: Stacks) -> threading.Thread:
        """Wait for an alarm in a thread with its own connection; then publish this rank's slot and write its stacks.

        A run calls it after its start. Other code must not: its process could end while the thread waits in the store.
        """
        store: Any = self._store  # torch's type stub of the class lacks `clone`
        waiting = threading.Thread(target=self._listen, args=(store.clone(), stacks), name="alarm", daemon=True)
        waiting.start()
        return waiting

    def raise_alarm(self) -> None:
        """Publish this rank's slot, and make the others publish theirs. Raises DistError: the store is gone."""
        self._publish(self._store)
        self._store.set(_ALARM, "said" if self.read(self._rank).has_said else "")

    def known(self, *, ended: bool = False) -> StatusBoard:
        """Return a board of what is known without the store: this rank's slot, and host and process of the others.

        Args:
            ended: rank 0 has ended, and the store with it.
        """
        whole, step = StatusBoard(self.size), self.read(self._rank).step
        for rank, there in enumerate(self._roll):
            state = FAILED if ended and rank == 0 else RUNNING
            whole.introduce(rank, state, step, there.pid, there.host, there.host_id)
        whole.fill(self._rank, self.raw(self._rank))
        return whole

    def gather(self, seconds: float) -> list[RankStatus]:
        """Return the status of every rank: what it publishes within `seconds`, else what `known` has."""
        whole, keys = self.known(), [f"status/{rank}" for rank in range(self.size)]
        until(lambda: self._store.check(keys), seconds)
        for rank, key in enumerate(keys):
            if self._store.check([key]):
                whole.fill(rank, zlib.decompress(self._store.get(key)))
        return whole.read_all()

    def is_first(self, text: str) -> bool:
        """Claim a text for printing; return True on the rank that claims it first, False on all others."""
        return int(self._store.compare_set(f"said/{text}", "", str(self._rank))) == self._rank

    def _listen(self, store: Store, stacks: Stacks) -> None:
        while True:
            try:
                store.wait([_ALARM], _WAITING)
                self.has_heard = bool(store.get(_ALARM))
                self._publish(store)
                if not self.has_heard and self.read(self._rank).state == RUNNING:  # a rank hangs, but not this one
                    stacks.write()
                return
            except dist.DistStoreError:  # no alarm within _WAITING
                continue
            except RuntimeError:  # rank 0 has ended with the store
                return

    def _publish(self, store: Store) -> None:
        packed: Any = zlib.compress(self.raw(self._rank))  # bytes, which torch's type stub of the method lacks
        store.set(f"status/{self._rank}", packed)
