"""The checks that a library in the kernel cache is whole and was put there by this user, before it is executed.

A shared library is code. It is taken from the cache only if its folder and the folders above belong to this user (or
to root) and nobody else may write to them, if the same holds for the file, and if its content has the SHA-256 that was
written beside it when it was built. A truncated library would otherwise end the process by SIGBUS when it is mapped,
and one that somebody else has put there would run with this user's rights.
"""

import hashlib
from pathlib import Path

from megazero.base.files import replace_file
from megazero.base.private_folder import is_private
from megazero.base.reading import open_regular, read_file

_SEAL_BYTES = 64  # of a SHA-256 in hex


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
    if not (library.exists() and seal_file.exists() and is_private(library) and is_private(seal_file)):
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
