"""Remember what was found out about huge token files, so that they are looked through once, not at each opening.

A record is a small file in the user's cache folder (so folders of data may be read-only, and other users' records are
never read), named by the data's path. It counts only while the data has the size, time of change, inode and hash of
samples that it had, and while the record's own hash is right; else it is made again. Who can write nothing there
looks through the data each time.

    one line  JSON: {"version": of what finds it, "of": identity, "hash": xxh3 of what follows}
    bytes     what was kept
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.base.private_folder import cache_folder, is_private, make_private_folder
from megazero.base.reading import parse_object, read_file
from megazero.data.data_file import DataFile

WORTH = 1 << 17  # documents, or sequences, from which on that is faster than to look again
_MOST = 1 << 30  # bytes of a record
_VERSION = 1  # another one where a check, the split or the blocks of documents.py become others: all is found again


class Memory:
    """The records of what was found out about some token files.

    Args:
        path: of them, by which it is found again.
        identity: what they must still be.
        folder: of the records; None: the user's.
    """

    def __init__(self, path: Path, identity: str, folder: Path | None = None):
        self.identity = identity
        home = cache_folder() if folder is None else folder
        self._base = None if home is None else home / "data" / xxhash.xxh3_128_hexdigest(os.fsencode(path.resolve()))

    def once(self, name: str, find: Callable[[], bytes]) -> bytes:
        """Return what was found under a name earlier, or find it now and keep it.

        Of several processes of this user one finds it, and the others wait for that.
        """
        if (kept := self.recall(name)) is not None:
            return kept
        with self._alone(name):
            kept = self.recall(name)
            if kept is None:
                kept = find()
                self._keep(name, kept)
        return kept

    def recall(self, name: str) -> bytes | None:
        """Return what was kept under a name; None: nothing is, or it is not to be trusted."""
        if self._base is None:
            return None
        path = self.path_of(name)
        with suppress(OSError, ValueError):
            make_private_folder(path.parent)
            if not is_private(path):
                return None
            head, _, kept = read_file(path, _MOST, follow=False).partition(b"\n")
            if parse_object(head) == self._head(kept):
                return kept
        return None

    def path_of(self, name: str) -> Path:
        """Return the file of a record; there must be a cache folder."""
        assert self._base is not None
        return self._base / name

    def file_once(self, name: str, find: Callable[[], Iterator[bytes]]) -> DataFile | None:
        """Return a file of what was found under a name earlier, or is found now; None: no file can be kept.

        It is for what is too large to be read and hashed at each opening: the record is the file's own identity.
        """
        if self._base is None:
            return None
        path = self.path_of(f"{name}.data")

        def made() -> bytes:
            replace_file(path, find())
            return identity_of(DataFile(path, "offsets", 203)).encode()

        for _ in range(2):  # the record may be there without its file, or with another one
            with suppress(OSError, UserError):
                kept, file = self.once(name, made), DataFile(path, "offsets", 203)
                if is_private(path) and identity_of(file).encode() == kept:
                    return file
            with suppress(OSError):
                self.path_of(name).unlink(missing_ok=True)
        return None

    def _keep(self, name: str, content: bytes) -> None:
        if self._base is None:
            return
        head = json.dumps(self._head(content))
        with suppress(OSError):  # a full disk, or a folder that is not ours: it is found again next time
            make_private_folder(self._base)
            replace_file(self.path_of(name), [head.encode(), b"\n", content])

    def _head(self, content: bytes) -> dict[str, Any]:
        return {"version": _VERSION, "of": self.identity, "hash": xxhash.xxh3_128_hexdigest(content)}

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Keep this user's other processes from finding the same while the context is open, where locks can be had."""
        descriptor = None
        if self._base is not None:
            with suppress(OSError):
                make_private_folder(self._base)
                descriptor = os.open(self._base / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                with doing("waiting for another process that looks through the same token files"):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                for left in chain.from_iterable(self._base.glob(f"{escape(name)}{end}.tmp-*") for end in ("", ".data")):
                    left.unlink(missing_ok=True)  # by a writer that was killed; nobody else writes this now
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)


def once(memory: Memory | None, name: str, find: Callable[[], bytes]) -> bytes:
    """Return what is found, of files that have a memory once (`Memory.once`)."""
    return find() if memory is None else memory.once(name, find)


def identity_of(*files: DataFile) -> str:
    """Return what files must still be for what is remembered of them: size, time of change, inode, samples of each."""
    return " ".join(f"{file.path.name} {tuple(file.identity)} {file.samples()}" for file in files)
