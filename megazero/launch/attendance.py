"""Encode and check the message that each rank sends at the roll call: no field is used before it is checked."""

import json
import re
from collections.abc import Callable
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
