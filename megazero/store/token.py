"""Derive the key that the ranks of one srun step share and no other user of the cluster knows.

It is derived from a secret and from the step's name (job, step, restart count), so that a rank of an earlier attempt
has another key. The secret is MEGAZERO_TOKEN, which the batch script makes anew for each job and SLURM hands to the
tasks in their environment, where only their owner can read it. Without it the secret is a file in the user's home, made
by whichever rank comes first. It is never on a command line, which every user of the host can read.
"""

import contextlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from megazero.base.errors import UserError

_SHORTEST, _LONGEST = 32, 256  # characters of a secret
_FILE = "token"
_DO = "export MEGAZERO_TOKEN=$(openssl rand -hex 32) in the batch script"


@dataclass(frozen=True)
class Secret:
    """The location of a step's secret.

    Attributes:
        token: the secret from the environment; None: the file `token` in `folder` has it.
        folder: the user's configuration folder.
        step: job, step and restart count.
    """

    token: str | None = field(repr=False)
    folder: Path
    step: str

    def key(self) -> bytes:
        """Return the step's key.

        Raises:
            UserError: 119, the secret is too short, cannot be had, or is not the user's alone.
        """
        text = self.token if self.token is not None else _of_file(self.folder)
        if not _SHORTEST <= len(text) <= _LONGEST or not text.isascii() or not text.isprintable():
            where = "MEGAZERO_TOKEN" if self.token is not None else str(self.folder / _FILE)
            what = f"expected {_SHORTEST} to {_LONGEST} printable ASCII characters, got {len(text)}"
            raise UserError(119, what, _DO if self.token is not None else "remove the file", where=where)
        return hmac.digest(text.encode(), f"megazero store of step {self.step}".encode(), "sha256")


def _of_file(folder: Path) -> str:
    """Return the secret in the user's file; make the file if it is missing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check(folder, folder.lstat(), stat.S_IFDIR, 0o700)
        with contextlib.suppress(FileExistsError):
            _make(folder)
        handle = os.open(folder / _FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, encoding="ascii", errors="replace") as file:
            _check(folder / _FILE, os.fstat(handle), stat.S_IFREG, 0o600)
            return file.read(_LONGEST + 2).strip()
    except OSError as error:
        raise UserError(119, f"no secret for the job: {error.strerror}", _DO, where=folder / _FILE) from None


def _make(folder: Path) -> None:
    """Make the file at once, so that no rank ever finds a part of it. Raises FileExistsError: it exists."""
    if os.path.lexists(folder / _FILE):
        raise FileExistsError
    draft = folder / f".{_FILE}.{secrets.token_hex(8)}"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(handle)
        os.link(draft, folder / _FILE)  # unlike a rename it never replaces another rank's
    finally:
        draft.unlink()


def _check(path: Path, found: os.stat_result, kind: int, mode: int) -> None:
    """Refuse a file or folder that other users can access."""
    if stat.S_IFMT(found.st_mode) != kind:
        what = f"expected a {'folder' if kind == stat.S_IFDIR else 'file'}, got something else"
    elif found.st_uid != os.geteuid():
        what = f"expected an owner of uid {os.geteuid()}, got {found.st_uid}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        what = f"expected mode {mode:04o}, got {stat.S_IMODE(found.st_mode):04o}: others may read it"
    else:
        return
    raise UserError(119, what, f"remove it, and change secrets in it; or {_DO}", where=path)
