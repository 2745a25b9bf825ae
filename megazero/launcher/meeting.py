"""Hold a roll call of a job's ranks in the store: which are there, which are missing, which run other code or config.

The roll call comes before torch's process groups, which wait for one key after the other and cannot name a missing
rank. Each rank registers; rank 0 alone reads all descriptions, publishes the roll, and reports a fault that ends the
job. So a rank makes the same few requests however many ranks there are.
"""

import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from megazero.base.answers import tell
from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.status_board import FAILED
from megazero.launcher.environment import RankContext
from megazero.launcher.store import until

SLACK = 5.0  # seconds for the store to answer, in addition to those that ranks wait for each other
_SEE = "see their output; are all hosts up, and does srun start every rank?"
_SAME = "start all ranks from one folder with one config and the same flags"


class Presence(NamedTuple):
    """A rank's description of itself.

    Attributes:
        host: the name of its host.
        fingerprint: a text that identifies its code and config.
        pid: the id of its process.
        host_id: equal for ranks that can share memory.
        outbox: the file descriptor of its outbox in shared memory; None: it has none.
    """

    host: str
    fingerprint: str
    pid: int
    host_id: int
    outbox: int | None = None


Verdict = tuple[int, Sequence[Presence]]  # the rank that reports a fault, and the roll; empty after a fault


def packed(verdict: Verdict) -> bytes:
    """Return a verdict (the rank that reports a fault, and the roll) as compressed bytes."""
    return zlib.compress(json.dumps(verdict).encode())


def unpacked(raw: bytes) -> Verdict:
    """Return the verdict that was packed."""
    speaker, roll = json.loads(zlib.decompress(raw))
    return speaker, [Presence._make(fields) for fields in roll]


def call_roll(store: Store, rank: int, size: int, seconds: float, mine: Presence) -> Sequence[Presence]:
    """Wait until every rank has registered, each with the same fingerprint; return the description of each.

    Args:
        seconds: how long to wait for the others.
        mine: this rank's description.

    Raises:
        UserError: 320, ranks are missing; 321, one runs other code or config.
        FailedElsewhere: another rank reports it.
    """
    store.set(f"here/{rank}", json.dumps(mine))
    store.add("here", 1)
    roll, error = _all_present(store, size, seconds) if rank == 0 else ((), None)
    if rank and not _decided(store, seconds):
        error = _no_answer(rank)
    if rank == 0 or error is not None:
        raw: Any = packed((rank, roll))  # bytes, which torch's type stub lacks
        store.compare_set("verdict", "", raw)  # of several ranks that time out, the first reports it
    speaker, roll = unpacked(store.get("verdict"))
    if roll:
        return roll
    store.add("heard", 1)
    if rank == 0:  # it may serve the store
        until(lambda: store.add("heard", 0) >= store.add("here", 0), SLACK)
    raise error if error is not None and speaker == rank else FailedElsewhere(speaker, 320)


def unanswered(place: RankContext) -> None:
    """Report that rank 0, which serves the store, does not answer; only rank 1 prints it."""
    error = _no_answer(place.world.rank)
    place.status_slot.set_state(FAILED, str(error))
    if place.world.rank == 1 and place.world.launcher != "local":  # a local parent reads the slot
        tell(error)


def _no_answer(rank: int) -> UserError:
    return UserError(320, f"rank 0 did not answer at the roll call; rank {rank} waited", _SEE, rank=0)


def _all_present(store: Store, size: int, seconds: float) -> tuple[Sequence[Presence], UserError | None]:
    """Wait for all ranks, on rank 0; return (the roll, None), or (empty, the error) if some are missing or differ."""
    keys = [f"here/{rank}" for rank in range(size)]
    if not until(lambda: store.add("here", 0) >= size, seconds):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        what = f"{len(missing)} of {size} ranks did not connect within {seconds:g} s: {shown}"
        return (), UserError(320, what, _SEE, rank=0)
    roll = [Presence(*json.loads(text)) for text in store.multi_get(keys)]
    for rank, there in enumerate(roll):
        if there.fingerprint != roll[0].fingerprint:
            what = f"runs {there.fingerprint} on {there.host}, rank 0 {roll[0].fingerprint} on {roll[0].host}"
            return (), UserError(321, what, _SAME, rank=rank)
    return roll, None


def _decided(store: Store, seconds: float) -> bool:
    """Return whether a verdict is published within `seconds`; if rank 0 has registered, wait for its timeout too."""

    def published() -> bool:
        return store.check(["verdict"])

    return until(published, seconds) or (store.check(["here/0"]) and until(published, seconds + SLACK))
