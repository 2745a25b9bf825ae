"""Encode and check the messages of the roll call, of one rank and of all: no field is used before it is checked."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from megazero.comm.transport.shared_memory import Handle

_LONGEST = 4096  # bytes of a message
_MOST_TEXT = 300  # characters of a text
_MOST_PID = 1 << 22  # PID_MAX_LIMIT of Linux
_MOST_NUMBER = 1 << 63
NOWHERE = Handle(0, -1, 0, 0)  # shares no memory


class InvalidPresenceError(ValueError):
    """An error for a message that no rank of this version sends."""


@dataclass(frozen=True)
class Presence:
    """A rank's description of itself.

    Attributes:
        host: its name.
        fingerprint: of code and config.
        pid: of its process.
        started: the start of that process, in the kernel's ticks; 0: unknown.
        host_id: equal for ranks that can share memory; "": it shares none.
        handle: of its outbox.
    """

    host: str
    fingerprint: str
    pid: int
    started: int
    host_id: str
    handle: Handle

    def to_json(self) -> str:
        """Return the message as JSON."""
        *mine, _ = vars(self).values()
        return json.dumps([*mine, *astuple(self.handle)])

    @classmethod
    def from_json(cls, raw: bytes) -> "Presence":
        """Return the rank that a message describes. Raises InvalidPresenceError."""
        if len(raw) > _LONGEST:
            raise InvalidPresenceError(f"{len(raw)} bytes, expected at most {_LONGEST}")
        try:
            said = json.loads(raw)
        except (ValueError, RecursionError):
            raise InvalidPresenceError("no JSON") from None
        return cls.checked(said)

    @classmethod
    def checked(cls, said: object) -> "Presence":
        """Return the rank that the fields of a message describe. Raises InvalidPresenceError."""
        if not isinstance(said, list) or len(said) != len(_FIELDS):
            raise InvalidPresenceError(f"expected a list of {len(_FIELDS)}")
        for (name, holds), value in zip(_FIELDS.items(), said, strict=True):
            if not holds(value):
                raise InvalidPresenceError(f"its {name} is none")
        host, fingerprint, pid, started, near, *handle = said
        found = cls(host, fingerprint, pid, started, near, Handle(*handle))
        if found.handle != NOWHERE and found.handle.pid != pid:
            raise InvalidPresenceError("its memory is of another process")
        return found


def pack_roll(roll: Sequence[Presence]) -> str:
    """Return the descriptions of all ranks, which have one fingerprint, in few characters."""
    hosts = list(dict.fromkeys((one.host, one.host_id) for one in roll))
    at = {host: number for number, host in enumerate(hosts)}
    rows = [[at[one.host, one.host_id], one.pid, one.started, *astuple(one.handle)] for one in roll]
    whole = json.dumps([roll[0].fingerprint, hosts, rows], separators=(",", ":"))
    return base64.b85encode(zlib.compress(whole.encode())).decode()


def unpack_roll(text: str, size: int) -> dict[int, Presence]:
    """Return the description of each of `size` ranks. Raises InvalidPresenceError."""
    try:
        stream = zlib.decompressobj()
        fingerprint, hosts, rows = json.loads(stream.decompress(base64.b85decode(text), size * _LONGEST))
        ranks = [(hosts[at], pid, started, handle) for at, pid, started, *handle in rows]
        said = [[host, fingerprint, pid, started, near, *handle] for (host, near), pid, started, handle in ranks]
    except (ValueError, TypeError, LookupError, RecursionError, zlib.error):
        raise InvalidPresenceError("no roll") from None
    if len(said) != size or not stream.eof:
        raise InvalidPresenceError(f"a roll of {len(said)} ranks, expected {size}")
    return {rank: Presence.checked(one) for rank, one in enumerate(said)}


def _text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT and (value == "" or value.isprintable())


def _within(low: int, end: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value < end


_FIELDS: dict[str, Callable[[object], bool]] = {
    "host": lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]{1,255}", value) is not None,
    "fingerprint": _text,
    "process": _within(1, _MOST_PID + 1),
    "start": _within(0, _MOST_NUMBER),
    "host's identity": _text,
    "memory's process": _within(0, _MOST_PID + 1),
    "descriptor": _within(-1, 1 << 31),
    "device": _within(0, _MOST_NUMBER * 2),
    "inode": _within(0, _MOST_NUMBER * 2),
}
