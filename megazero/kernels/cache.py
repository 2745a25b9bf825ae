"""The checks that a library in the kernel cache is whole and was put there by this user, before it is executed.

A shared library is code. It is taken from the cache only if its folder and the folders above belong to this user (or
to root) and nobody else may write to them, if the same holds for the file, and if its content has the SHA-256 that was
written beside it when it was built. A truncated library would otherwise end the process by SIGBUS when it is mapped,
and one that somebody else has put there would run with this user's rights.
"""

import hashlib
import os
import stat
from pathlib import Path

from megazero.base.files import replace_file
from megazero.base.reading import open_regular, read_file

_SEAL_BYTES = 64  # of a SHA-256 in hex
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedCacheError(OSError):
    """The error that somebody else could change what is executed from the cache; the text is one line."""


def make_private_folder(folder: Path) -> None:
    """Make the cache's folder, for this user alone, and refuse one that others can put something into.

    A folder of this user's that others can write to is closed to them first. What they have put there is not loaded:
    it is not this user's file, or has not the sealed content.

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


def seal(unfinished: Path, library: Path) -> None:
    """Give a finished library its name, with the hash of its content beside it.

    The hash comes first: who is killed in between leaves a name without a fitting hash, which is built again.

    Raises:
        OSError: the disk does not take it.
    """
    unfinished.chmod(0o755)  # whatever the umask is
    replace_file(_seal_of(library), _digest(unfinished).encode())
    _seal_of(library).chmod(0o644)
    unfinished.replace(library)


def is_sealed(library: Path) -> bool:
    """Return True if a library is there, belongs to this user, and has the content that was sealed.

    Raises:
        OSError: the folder may not be entered.
    """
    seal_file = _seal_of(library)
    if not (library.exists() and seal_file.exists() and _is_private(library) and _is_private(seal_file)):
        return False
    try:
        return read_file(seal_file, _SEAL_BYTES, follow=False) == _digest(library).encode()
    except OSError:  # a link, a folder, or larger than a hash
        return False


def _seal_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(path: Path) -> str:
    with open_regular(path, follow=False) as descriptor, open(descriptor, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_private(path: Path) -> bool:
    status = path.lstat()
    return _is_ours(status.st_uid) and not status.st_mode & _OTHERS_MAY_WRITE


def _is_ours(user: int) -> bool:
    """Return True if a file's owner could act as this user anyway: it is this user or root.

    In a container without root, root has another number: that of whoever owns the root folder.
    """
    return user in (os.geteuid(), 0, os.stat("/").st_uid)
