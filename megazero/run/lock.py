"""Lock a run's folder for one job: the job holds a system lock (flock) on the file `lock`, which names its owner.

The system releases the lock when the process ends, however it ends, so a file whose lock is free belongs to a dead job
and is taken over. On a network disk the lock holds on every host that mounts the disk with locks. On a disk without
locks the file itself is the lock: the user removes it after a crash. Before a job commits a step it reads the file; if
the file has another job's word or is missing, the job commits nothing.
"""

import fcntl
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from megazero.base.errors import UserError
from megazero.base.reading import parse_object, read_file

_KEYS = ("word", "host", "pid", "since", "job")
_LOCK_BYTES = 4096
_DO = "wait for it, end it, or give another run.dir"
_SETTLED = 1.0  # seconds after which two jobs that wrote the file at once read the same owner
_TRIES, _PAUSE = 5, 0.05  # a job that only looks at the lock holds it for a moment


class RunLock:
    """The lock of one run's folder; call `take` first.

    Attributes:
        word: a random text that identifies this job.
    """

    def __init__(self, path: Path, job: str = ""):
        self._path, self.word = path, uuid.uuid4().hex[:12]
        values = (self.word, socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"), job)
        self._content = json.dumps(dict(zip(_KEYS, values, strict=True)))
        self._descriptor: int | None = None
        self._is_locked = True  # by the system

    def take(self) -> str | None:
        """Make the folder this job's; return the name of a dead job whose lock it took over, if there was one.

        Raises:
            UserError: 420, another job has it, or the file is not a lock.
            OSError: it cannot be written.
        """
        descriptor, text = self._acquired(os.O_CREAT)
        try:
            owner = _parsed(text)
            if text and owner is None:
                raise self._no_lock()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._content.encode(), 0)
            os.fsync(descriptor)  # the previous owner, on another host, must be able to read it
            if not self._is_locked:
                time.sleep(_SETTLED)
                if self.loss() is not None:
                    raise UserError(420, "another job has just begun here", _DO, where=self._path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return _named(owner) if owner else None

    def refuse_if_held(self) -> None:
        """Refuse to go on if a running job holds the lock. Raises UserError 420."""
        with suppress(OSError):
            os.close(self._acquired(0)[0])

    @property
    def held(self) -> bool:
        """Return whether this job has taken the lock and, as far as can be seen, still has it."""
        return self._descriptor is not None and self.loss() is None

    def loss(self) -> str | None:
        """Return how this job has lost the lock it took; None: it has not, or the disk does not answer."""
        try:
            owner = _parsed(read_file(self._path, _LOCK_BYTES))
        except FileNotFoundError:
            return "the lock was removed while this job trained, by hand or by another job that has ended"
        except OSError:
            return None
        if owner is None or owner["word"] != self.word:
            return "another job took over this folder while this one trained"
        return None

    def release(self) -> None:
        """Release the lock, and remove the file unless it belongs to another job by now."""
        if self._descriptor is None:
            return
        with suppress(OSError):
            if self.held:
                self._path.unlink()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for a forked process that has inherited it
        os.close(self._descriptor)
        self._descriptor = None

    def _acquired(self, flags: int) -> tuple[int, bytes]:
        """Open and lock the file; return its descriptor and content. Raises UserError 420, OSError."""
        for tries_left in reversed(range(_TRIES)):
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
            except OSError:  # a link, a folder, or another user's
                if not os.path.lexists(self._path):
                    raise
                raise self._no_lock() from None
            try:
                text = os.pread(descriptor, _LOCK_BYTES, 0)
            except OSError:  # a FIFO
                os.close(descriptor)
                raise self._no_lock() from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, self._path):  # else its owner has removed the file in between
                    return descriptor, os.pread(descriptor, _LOCK_BYTES, 0)
            except BlockingIOError:
                pass
            except OSError:  # a disk without locks
                self._is_locked = False
                if not text:
                    return descriptor, text
            os.close(descriptor)
            if tries_left:
                time.sleep(_PAUSE)
        owner = _parsed(text)
        what = f"another job trains here: {_named(owner) if owner else 'its lock is held'}"
        raise UserError(420, what, _DO, where=self._path.parent)

    def _no_lock(self) -> UserError:
        return UserError(420, "is not a lock file, or damaged", "remove it if no job trains there", where=self._path)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _named(owner: dict[str, Any]) -> str:
    job = f", job {owner['job']}" if owner["job"] else ""
    return f"process {owner['pid']} on {owner['host']}{job}, since {owner['since']}"


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return the owner that a lock file names; None if it is not such a file."""
    with suppress(ValueError):
        found = parse_object(text)
        return found if all(type(found.get(key)) is (int if key == "pid" else str) for key in _KEYS) else None
    return None
