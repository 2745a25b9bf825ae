"""Keep a folder for this user alone, and refuse what somebody else could have put there.

What is read back from a cache is believed: a library is executed, and an index counts as checked. So a folder is used
only if it and the folders above belong to this user (or to root) and nobody else may write to them.
"""

import os
import stat
from pathlib import Path

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Return the user's cache folder of this project, made or not; None: the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazero"
    except RuntimeError:  # no HOME, and a user without an entry in the password file
        return None


class UntrustedCacheError(OSError):
    """The error that somebody else could change what is executed from the cache; the text is one line."""


def make_private_folder(folder: Path) -> None:
    """Make the cache's folder, for this user alone, and refuse one that others can put something into.

    A folder of this user's that others can write to is closed to them first. What they have put there is not used:
    it is not this user's file (`is_private`).

    Raises:
        UntrustedCacheError: the folder, or one above it, belongs to somebody else, or one above can be written by
            others.
        OSError: it cannot be made.
    """
    missing = [part for part in (folder, *folder.parents) if not part.is_dir()]
    for part in reversed(missing):  # a mask of 002 would let the group write to the new folders above
        part.mkdir(exist_ok=True, mode=0o700)
    place = folder.resolve()
    if place.stat().st_uid == os.geteuid() and place.stat().st_mode & _OTHERS_MAY_WRITE:
        place.chmod(0o700)
    refuse_shared(place)


def refuse_shared(folder: Path) -> None:
    """Refuse a folder that others can put something into.

    Raises:
        UntrustedCacheError: it, or one above it, belongs to somebody else or can be written by others.
        OSError: it is not there, or may not be looked at.
    """
    place = folder.resolve()
    for part in (place, *place.parents):
        status = part.stat()
        sticky = part != place and status.st_mode & stat.S_ISVTX  # in /tmp others cannot rename what is ours
        if not _is_ours(status.st_uid):
            what = f"{part} belongs to user {status.st_uid}"
            raise UntrustedCacheError(f"{what}: set XDG_CACHE_HOME to a folder of your own")
        if status.st_mode & _OTHERS_MAY_WRITE and not sticky:
            mode = stat.S_IMODE(status.st_mode)
            raise UntrustedCacheError(f"{part} can be written by others (mode {mode:o}): chmod go-w it")


def is_private(path: Path) -> bool:
    """Return whether a file is this user's, and nobody else may write to it. Raises OSError: it is not there."""
    status = path.lstat()
    return _is_ours(status.st_uid) and not status.st_mode & _OTHERS_MAY_WRITE


def _is_ours(user: int) -> bool:
    """Return True if a file's owner could act as this user anyway: it is this user or root.

    In a container without root, root has another number: that of whoever owns the root folder.
    """
    return user in (os.geteuid(), 0, os.stat("/").st_uid)
