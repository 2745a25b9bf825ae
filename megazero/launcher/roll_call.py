"""Call the roll: each rank describes itself in the store, rank 0 reads all and publishes one verdict for all.

A rank makes the same few requests however many ranks there are, because rank 0's process answers them all. Rank 0 alone
reads the descriptions; the verdict is the roll, or the fault that ends the run.
"""

import json
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megazero.base.errors import FailedElsewhere, UserError
from megazero.launcher.attendance import InvalidPresenceError, Presence, pack_roll, unpack_roll
from megazero.store.client import JobStore

_SLICE = 0.5  # seconds of one wait where torch's code waits: a signal is handled between two
_AT_ONCE = 256  # values in one answer of the store, of at most 4,096 bytes each
_SAME = "start all ranks from one folder with one config and the same flags"
_ROLL, _ODD, _LATE = "+-?"  # the first character of a verdict: all is well, one rank is odd, ranks are missing
_HEARD = 5.0  # seconds for those that have come to hear that others have not


def call_roll(store: Store, rank: int, size: int, seconds: float, mine: Presence) -> dict[int, Presence]:
    """Wait until every rank has come, each with the same fingerprint; return the description of each.

    Args:
        seconds: how long to wait for the others.
        mine: this rank's description.

    Raises:
        UserError: 320, ranks do not come; 321, one runs other code or config, or described itself wrongly.
        FailedElsewhere: another rank reports it.
    """
    store.set(f"here/{rank}", mine.to_json())
    if store.add("arrived", 1) == size:
        store.set("all here", "")
    if rank == 0:
        store.set("verdict", _verdict(store, size, seconds))
    elif not _decided(store, seconds):
        raise _undecided(store, rank, size, seconds)
    verdict = store.get("verdict").decode(errors="replace")
    if store.add("heard", 1) == size:
        store.set("all heard", "")
    if rank == 0:  # which may hold the store: without it the others would not know whom to blame
        came(store, "all heard", min(seconds, _HEARD) if verdict[:1] == _LATE else seconds)
    return _judged(verdict, rank, size)


def came(store: Store, key: str, seconds: float) -> bool:
    """Wait until a key is set; return False if it is not in time.

    Raises:
        DistNetworkError: rank 0, which holds the store, has ended.
        NoAnswer: it does not answer.
    """
    deadline = time.monotonic() + seconds
    most = seconds if isinstance(store, JobStore) else _SLICE  # our own client notes signals while it waits
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(min(left, most), 0.02)))
            return True
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a slice is over: torch's stores have different words for it
            if left <= 0:
                return False


def absent(store: Store, key: str, ranks: Sequence[int]) -> list[int]:
    """Return those of `ranks` that have not set their `key`: few requests where few ranks are missing."""
    if not ranks or store.check([f"{key}/{rank}" for rank in ranks]):
        return []
    middle = len(ranks) // 2
    return [*absent(store, key, ranks[:middle]), *absent(store, key, ranks[middle:])] if middle else list(ranks)


def values(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the values of keys that are set: few requests, each with an answer of bounded size."""
    for first in range(0, len(keys), _AT_ONCE):
        yield from store.multi_get(list(keys[first : first + _AT_ONCE]))


def elected(store: Store, key: str, rank: int) -> int:
    """Return the rank that speaks for all that ask for the same key: the first one."""
    return int(store.compare_set(key, "", str(rank)))


def shown(ranks: Sequence[int]) -> str:
    """Return ranks as an error lists them."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _verdict(store: Store, size: int, seconds: float) -> str:
    """Return the roll, or what is wrong, as text; rank 0 alone calls it."""
    if not came(store, "all here", seconds) and (missing := absent(store, "here", range(size))):
        return _LATE + _missing(missing, size, seconds)
    keys = [f"here/{rank}" for rank in range(size)]
    roll: dict[int, Presence] = {}
    odd: dict[int, str] = {}
    for rank, raw in enumerate(values(store, keys)):
        try:
            roll[rank] = Presence.from_json(raw)
        except InvalidPresenceError as error:
            odd[rank] = f"said what is no presence at the roll call: {error}"
            continue
        first = min(roll)
        if roll[rank].fingerprint != roll[first].fingerprint:
            what = f"runs {roll[rank].fingerprint} on {roll[rank].host}, "
            odd[rank] = what + f"rank {first} {roll[first].fingerprint} on {roll[first].host}"
    if not odd:
        return _ROLL + pack_roll([roll[rank] for rank in range(size)])
    rank, what = next(iter(odd.items()))
    speaker = rank if rank in roll or not roll else min(roll)  # an odd one may not be able to speak
    return _ODD + json.dumps([speaker, rank, what])


def _judged(verdict: str, rank: int, size: int) -> dict[int, Presence]:
    """Return the roll of a verdict, or raise its fault."""
    kind, said = verdict[:1], verdict[1:]
    if kind == _LATE:
        raise _late(said, rank) if rank == 0 else FailedElsewhere(0, 320)
    try:
        if kind == _ROLL:
            return unpack_roll(said, size)
        speaker, blamed, what = json.loads(said)
        odd = UserError(321, str(what), _SAME, rank=int(blamed))
    except (InvalidPresenceError, ValueError, TypeError, RecursionError) as error:
        raise UserError(321, f"published what is no roll: {error}", _SAME, rank=0) from None
    raise odd if speaker == rank else FailedElsewhere(int(speaker), 321)


def _decided(store: Store, seconds: float) -> bool:
    """Return whether rank 0 has published a verdict in time: counted from its own arrival, where it came later."""
    return came(store, "verdict", seconds) or (store.check(["here/0"]) and came(store, "verdict", seconds + _HEARD))


def _undecided(store: Store, rank: int, size: int, seconds: float) -> UserError:
    """Return the error for a rank 0 that did not come, or came and was held up."""
    speaker = elected(store, "speaker", rank)
    if speaker != rank:
        return FailedElsewhere(speaker, 320)
    if missing := absent(store, "here", range(size)):
        return _late(_missing(missing, size, seconds), rank)
    what = f"came to the meeting, and did not go on within {seconds:g} s; rank {rank} waited"
    return UserError(320, what, "is its process stopped? see its output", rank=0)


def _missing(ranks: Sequence[int], size: int, seconds: float) -> str:
    return f"{len(ranks)} of {size} ranks did not come within {seconds:g} s: {shown(ranks)}"


def _late(what: str, rank: int) -> UserError:
    return UserError(320, what, "see their output; are all hosts up, was srun left out?", rank=rank)
