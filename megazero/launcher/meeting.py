"""Let the ranks of a job meet in the store: who they are, who is missing, who runs something else.

The roll call comes before torch's process groups, which wait for one key after the other and cannot name a rank that
does not come. Each rank registers; rank 0 alone reads all descriptions, and publishes one verdict: the roll, or the
fault that ends the job. So a rank makes the same few requests however many ranks there are.
"""

import contextlib
import json
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from megazero.base.errors import FailedElsewhere, UserError
from megazero.base.heartbeat import HEART
from megazero.comm.memfd import Handle
from megazero.comm.processes import Process
from megazero.comm.status_board import FAILED
from megazero.launcher.diagnosis import SLOW, STOPPED
from megazero.launcher.environment import RankContext
from megazero.launcher.store import deadline, until

SLACK = 5.0  # seconds that the store may take to answer beyond what ranks wait for each other
_LATER = 1.0  # seconds that ranks may give up later than the first one
_SILENT = "rank 0 did not answer at the roll call"
_SEE = "see their output; are all hosts up, was srun left out?"
_SAME = "start all ranks from one folder with one config and the same flags"


@dataclass(frozen=True)
class Presence:
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
    def of(cls, fields: dict[str, Any]) -> "Presence":
        """Return the presence with the fields that `asdict` gave."""
        handle = fields.pop("handle")
        return cls(**fields, handle=handle and Handle(**handle))


@dataclass(frozen=True)
class Verdict:
    """The end of a roll call.

    Attributes:
        roll: all ranks, as they described themselves; empty where they cannot go on.
        fault: why: code, text and advice.
        speaker: the rank that reports it.
    """

    roll: dict[int, Presence]
    fault: tuple[int, str, str] = (320, "", "")
    speaker: int = 0

    def packed(self) -> bytes:
        """Return the verdict in few bytes."""
        return zlib.compress(json.dumps(asdict(self)).encode())


def unpacked(packed: bytes) -> Verdict:
    """Return the verdict that `packed` gave."""
    said = json.loads(zlib.decompress(packed))
    roll = {int(rank): Presence.of(fields) for rank, fields in said["roll"].items()}
    return Verdict(roll, tuple(said["fault"]), said["speaker"])


def call_roll(store: Store, rank: int, size: int, seconds: float, mine: Presence) -> dict[int, Presence]:
    """Wait until every rank has come, each with the same fingerprint; return the description of each.

    Args:
        seconds: how long to wait for the others.
        mine: this rank's description.

    Raises:
        UserError: 320, ranks do not come; 321, one runs other code or config.
        FailedElsewhere: another rank reports it.
    """
    store.set(f"here/{rank}", json.dumps(asdict(mine)))
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


def absent(store: Store, key: str, ranks: Iterable[int]) -> list[int]:
    """Return those of `ranks` that have not set their `key`."""
    return [rank for rank in ranks if not store.check([f"{key}/{rank}"])]


def elected(store: Store, key: str, rank: int) -> int:
    """Return the rank that speaks for all that ask with the same key: the first one."""
    return int(store.compare_set(key, "", str(rank)))


def say(line: str) -> None:
    """Print a line on standard error, if there is any."""
    if line:
        with HEART.paused():
            print(line, file=sys.stderr, flush=True)


def unanswered(place: RankContext, error: UserError | None = None) -> None:
    """Report that rank 0, which serves the store, does not answer: the first of the others does."""
    error = error or UserError(320, f"{_SILENT}; rank {place.world.rank} waited", _SEE, rank=0)
    place.status_slot.set_state(FAILED, str(error))
    if place.world.rank == 1 and place.world.launcher != "local":  # a parent reads the slot
        say(str(error))


@dataclass(frozen=True)
class Lobby:
    """The ranks between the roll call and the first step.

    Attributes:
        place: of this process.
        store: the store that all ranks reach; must live as long as torch's groups use it.
        roll: all ranks, as they described themselves.
        seconds: how long an operation waits for the others.
    """

    place: RankContext
    store: Store
    roll: Mapping[int, Presence]
    seconds: float

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Name the missing rank when something that all ranks do, each waiting for the others, fails inside.

        Raises:
            UserError: 311, a rank did not do it in time; 320, it went wrong though all ranks came.
            FailedElsewhere: another rank reports it.
        """
        rank = self.place.world.rank
        try:
            with deadline(2 * self.seconds + SLACK, lambda: unanswered(self.place, self._blamed(what, 0))):
                yield
                self.store.set(f"{what}/{rank}", "done")
        except UserError:
            raise
        except RuntimeError as error:  # all of torch's, and CollectiveError
            raise self._fault(what, " ".join(str(error).split())[:80]) from None

    def _fault(self, what: str, reason: str) -> UserError:
        """Return the error that names a rank which neither got through nor gave up in time.

        One rank alone looks for it; the others stay until it has: a launcher may end all ranks with the first one.
        """
        rank, store = self.place.world.rank, self.store
        with deadline(SLACK, lambda: unanswered(self.place, self._blamed(what, 0))):
            try:
                store.set(f"{what}/{rank}", "late")
                speaker = elected(store, f"{what}/speaker", rank)
                time.sleep(_LATER if speaker == rank else 2 * _LATER)
                if speaker != rank:
                    return FailedElsewhere(speaker, 311)
                missing = absent(store, what, self.roll)
            except RuntimeError:  # rank 0 has ended with the store, and says why
                return FailedElsewhere(0, 311)
        if missing:
            return self._blamed(what, missing[0])
        return UserError(320, f"{what}: {reason}", "see the network between the ranks' hosts", rank=rank)

    def _blamed(self, what: str, missing: int) -> UserError:
        there, rank = self.roll[missing], self.place.world.rank
        here = there.host_id != "" and there.host_id == self.roll[rank].host_id
        stopped = here and Process(there.pid, there.started).is_stopped
        line = f"did not answer in the meeting ({what}) in start on {there.host} (pid {there.pid})"
        return UserError(311, f"{line}; rank {rank} waited", STOPPED if stopped else SLOW, rank=missing)


def _verdict(store: Store, rank: int, size: int, seconds: float) -> Verdict:
    """Return the roll, or why there is none: on rank 0 when all have come or time is up, on others when it is up."""
    came = rank == 0 and until(lambda: store.add("here", 0) >= size, seconds)
    missing = [] if came else absent(store, "here", range(size))
    if rank == 0 and not missing:
        texts = store.multi_get([f"here/{other}" for other in range(size)])
        roll = {other: Presence.of(json.loads(text)) for other, text in enumerate(texts)}
        first = roll[0]
        for other, there in roll.items():
            if there.fingerprint != first.fingerprint:
                what = f"runs {there.fingerprint} on {there.host}, rank 0 {first.fingerprint} on {first.host}"
                return Verdict({}, (321, what, _SAME), other)
        return Verdict(roll)
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    what = f"{len(missing)} of {size} ranks did not come within {seconds:g} s: {shown}" if missing else _SILENT
    return Verdict({}, (320, what, _SEE), rank)


def _decided(store: Store, seconds: float) -> bool:
    """Return whether there is a verdict in time: counted from rank 0's arrival, where it came later."""

    def published() -> bool:
        return store.check(["verdict"])

    return until(published, seconds) or (store.check(["here/0"]) and until(published, seconds + SLACK))
