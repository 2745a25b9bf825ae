"""Let the ranks of a job meet in the store: who they are, who is missing, who runs something else.

The roll call comes before torch's process groups, which wait for one key after the other and cannot name a rank that
does not come. Each rank registers; rank 0 alone reads all descriptions, and publishes one verdict: the roll, or the
fault that ends the job. So a rank makes the same few requests however many ranks there are.
"""

import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from megazero.base.answers import tell
from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.memfd import Handle
from megazero.comm.status_board import FAILED
from megazero.launcher.environment import RankContext
from megazero.launcher.store import until

SLACK = 5.0  # seconds that the store may take to answer beyond what ranks wait for each other
_SILENT = "rank 0 did not answer at the roll call"
_SEE = "see their output; are all hosts up, was srun left out?"
_SAME = "start all ranks from one folder with one config and the same flags"


class Presence(NamedTuple):
    """A rank's description of itself.

    Attributes:
        host: its name.
        fingerprint: of code and config.
        pid: of its process.
        started: the start of that process, in the kernel's ticks; 0: unknown.
        host_id: equal for ranks that can share memory; "": it shares none.
        handle: of its outbox; None: it has none.
    """

    host: str
    fingerprint: str
    pid: int
    started: int
    host_id: str
    handle: Handle | None = None

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "Presence":
        """Return the presence with the fields that JSON has kept."""
        found = cls._make(fields)
        return found._replace(handle=found.handle and Handle(*found.handle))


class Verdict(NamedTuple):
    """The end of a roll call.

    Attributes:
        roll: all ranks, as they described themselves; empty where they cannot go on.
        fault: why: code, text and advice.
        speaker: the rank that reports it.
    """

    roll: Sequence[Presence]
    fault: tuple[int, str, str] = (320, "", "")
    speaker: int = 0

    def packed(self) -> bytes:
        """Return the verdict in few bytes."""
        return zlib.compress(json.dumps(self).encode())


def unpacked(packed: bytes) -> Verdict:
    """Return the verdict that `packed` gave."""
    roll, fault, speaker = json.loads(zlib.decompress(packed))
    return Verdict([Presence.of(fields) for fields in roll], tuple(fault), speaker)


def call_roll(store: Store, rank: int, size: int, seconds: float, mine: Presence) -> Sequence[Presence]:
    """Wait until every rank has come, each with the same fingerprint; return the description of each.

    Args:
        seconds: how long to wait for the others.
        mine: this rank's description.

    Raises:
        UserError: 320, ranks do not come; 321, one runs other code or config.
        FailedElsewhere: another rank reports it.
    """
    store.set(f"here/{rank}", json.dumps(mine))
    store.add("here", 1)
    if rank == 0 or not _decided(store, seconds):
        packed: Any = _verdict(store, rank, size, seconds).packed()  # bytes, which torch's description does not name
        store.compare_set("verdict", "", packed)  # of several ranks whose time is up the first one speaks
    verdict = unpacked(store.get("verdict"))
    if verdict.roll:
        return verdict.roll
    store.add("heard", 1)
    if rank == 0:  # which may serve the store
        until(lambda: store.add("heard", 0) >= store.add("here", 0), SLACK)
    if verdict.speaker != rank:
        raise FailedElsewhere(verdict.speaker, verdict.fault[0])
    raise UserError(*verdict.fault, rank=rank)


def unanswered(place: RankContext) -> None:
    """Report that rank 0, which serves the store, does not answer: the first of the others does."""
    error = UserError(320, f"{_SILENT}; rank {place.world.rank} waited", _SEE, rank=0)
    place.status_slot.set_state(FAILED, str(error))
    if place.world.rank == 1 and place.world.launcher != "local":  # a parent reads the slot
        tell(error)


def _verdict(store: Store, rank: int, size: int, seconds: float) -> Verdict:
    """Return the roll, or why there is none: on rank 0 when all have come or time is up, on others when it is up."""
    came = rank == 0 and until(lambda: store.add("here", 0) >= size, seconds)
    missing = [] if came else [other for other in range(size) if not store.check([f"here/{other}"])]
    if rank == 0 and not missing:
        texts = store.multi_get([f"here/{other}" for other in range(size)])
        roll = [Presence.of(json.loads(text)) for text in texts]
        first = roll[0]
        for other, there in enumerate(roll):
            if there.fingerprint != first.fingerprint:
                what = f"runs {there.fingerprint} on {there.host}, rank 0 {first.fingerprint} on {first.host}"
                return Verdict((), (321, what, _SAME), other)
        return Verdict(roll)
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    what = f"{len(missing)} of {size} ranks did not come within {seconds:g} s: {shown}" if missing else _SILENT
    return Verdict((), (320, what, _SEE), rank)


def _decided(store: Store, seconds: float) -> bool:
    """Return whether there is a verdict in time: counted from rank 0's arrival, where it came later."""

    def published() -> bool:
        return store.check(["verdict"])

    return until(published, seconds) or (store.check(["here/0"]) and until(published, seconds + SLACK))
