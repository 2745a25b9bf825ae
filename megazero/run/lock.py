"""Lock a run directory for one job: a file says whose it is.

The owner writes its host, its process and a random word into `lock`, and touches the file every few seconds. Another
job that finds it there is refused, unless the owner is dead: on the same host when its process is gone, on another when
the file is not touched for several times that long. No clock is compared with another's: the newcomer watches whether
anything changes.

Taking over is replacing the file, and a job whose lock has been taken over (it was stopped for a while, or its disk
did not answer) finds another's word in it, and may not commit a step any more.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from enum import Enum
from pathlib import Path
from typing import Any

from megazero.base.errors import UserError
from megazero.base.files import modified_at, temporary_name
from megazero.base.reading import UnexpectedFileError, parse_object, read_file

_TOUCH = 2.0  # seconds
_WATCH = 8.0  # seconds without a touch: the owner is dead
_LOOKS = 20
_KEYS = {"word": str, "host": str, "kernel": str, "pid": int, "born": str, "since": str, "job": str}
_LOCK_BYTES = 4096


class State(Enum):
    """The owners that a lock can have."""

    OURS = "ours"
    ANOTHERS = "another's"
    GONE = "gone"


class RunLock:
    """The lock of one run directory; `take` first.

    Attributes:
        word: identifies this job, new each time.
    """

    def __init__(self, path: Path, job: str = ""):
        self._path, self.word = path, uuid.uuid4().hex[:12]
        self._content = json.dumps(
            {
                "word": self.word,
                "host": socket.gethostname(),
                "kernel": _kernel(),
                "pid": os.getpid(),
                "born": _born(os.getpid()),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "job": job,
            }
        )
        self._released = threading.Event()
        self._taken = False

    def take(self) -> str | None:
        """Make the directory this job's; return whose dead lock it took over, if there was one.

        Raises:
            UserError: 420, another job has it.
            OSError: it cannot be written.
        """
        dead, looks = None, 0
        while not self._create():
            owner = _read(self._path)
            if owner is None:  # released meanwhile: look again
                looks += 1
                if looks == _LOOKS:
                    what = "is no lock of ours, or damaged"
                    raise UserError(420, what, "remove it if no job trains there", where=self._path)
                time.sleep(0.05)
                continue
            if not self._is_dead(owner):
                raise _taken(self._path, owner)
            if self._replace(owner):
                dead = _who(owner)
                break
        self._taken = True
        threading.Thread(target=self._keep_touching, name="lock", daemon=True).start()
        return dead

    def refuse_if_held(self) -> None:
        """Refuse to go on if a living job has it. Raises UserError 420."""
        owner = _read(self._path)
        if owner is not None and owner["word"] != self.word and not self._is_dead(owner):
            raise _taken(self._path, owner)

    @property
    def held(self) -> bool:
        """Return whether it is still this job's, as far as can be seen."""
        return self.state is State.OURS

    @property
    def state(self) -> "State":
        """Return whose it is now; to the job that has taken it, it stays its own while the disk does not answer."""
        try:
            owner = _parsed(read_file(self._path, _LOCK_BYTES))
        except FileNotFoundError:
            return State.GONE
        except UnexpectedFileError:
            return State.ANOTHERS
        except OSError:
            return State.OURS if self._taken else State.ANOTHERS
        return State.OURS if owner is not None and owner["word"] == self.word else State.ANOTHERS

    def release(self) -> None:
        """Free the directory; do nothing if it is another's by now."""
        self._released.set()
        if self._bears_our_word():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _bears_our_word(self) -> bool:
        """Return whether the file has been read, and is ours: what cannot be read may be another job's."""
        owner = _read(self._path)
        return owner is not None and owner["word"] == self.word

    def _create(self) -> bool:
        """Create a whole lock or none, linked to its name once it is written; return whether that succeeded."""
        temporary = self._write()
        try:
            os.link(temporary, self._path)
        except FileExistsError:
            return self._bears_our_word()  # a network's disk may have linked it and lost the answer
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _write(self) -> Path:
        temporary = temporary_name(self._path)
        temporary.write_text(self._content)
        return temporary

    def _replace(self, owner: dict[str, Any]) -> bool:
        """Take a dead owner's lock over, if no other newcomer has done so; return whether that succeeded."""
        try:
            with self._path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if _read(self._path) != owner:
                    return False
                self._write().replace(self._path)
        except FileNotFoundError:
            return False
        return True

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        if (owner["host"], owner["kernel"]) == (socket.gethostname(), _kernel()):
            return _born(owner["pid"]) != owner["born"]
        before, until = modified_at(self._path), time.monotonic() + _WATCH
        while time.monotonic() < until:
            time.sleep(_TOUCH / 4)
            if modified_at(self._path) != before:
                return False
        return True

    def _keep_touching(self) -> None:
        while not self._released.wait(_TOUCH):
            with contextlib.suppress(OSError):
                if self.held:
                    os.utime(self._path)


def remove_dead(path: Path) -> None:
    """Remove a lock whose owner was a process of this host that has ended; another's that comes meanwhile stays."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        owner = _read(path)
        if owner is None or (owner["host"], owner["kernel"]) != (socket.gethostname(), _kernel()):
            return
        if _born(owner["pid"]) != owner["born"]:
            path.unlink()


def _taken(path: Path, owner: dict[str, Any]) -> UserError:
    what = f"another job trains here: {_who(owner)}"
    return UserError(420, what, "wait for it, end it, or give another run.dir", where=path.parent)


def _who(owner: dict[str, Any]) -> str:
    job = f", job {owner['job']}" if owner["job"] else ""
    return f"process {owner['pid']} on {owner['host']}{job}, since {owner['since']}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return _parsed(read_file(path, _LOCK_BYTES))
    except OSError:
        return None


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return the owner that a lock names; None if it is no lock of ours."""
    try:
        found = parse_object(text)
    except ValueError:
        return None
    if found.keys() != _KEYS.keys() or any(type(found[key]) is not kind for key, kind in _KEYS.items()):
        return None
    return found if 0 < found["pid"] < 2**31 else None


def _kernel() -> str:
    """Return this boot and process namespace: containers may share a host's name, and not its processes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str:
    """Return when a process of this host started, which tells it from a later one with its number; "" for none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return "alive"
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]  # a process that has ended and was not waited for is dead
