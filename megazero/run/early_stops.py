"""Count the starts of a run that are stopped before its first step, and stop restarting it after three.

Each such start asks to be restarted (exit code 75) and changes nothing, so a queue would restart it for ever. A file in
the run's folder has a line for each of them. The first completed step removes it. From the third such start in a row
on, the run fails until the file is removed.
"""

import contextlib
from pathlib import Path

from megazero.base.errors import UserError

MOST = 3
_DO = "give the run more time to start, find out what signals it, and remove this file to try again"


class EarlyStops:
    """The starts in a row that were stopped before the first step.

    Args:
        path: the file of their reasons.
    """

    def __init__(self, path: Path):
        self._path = path

    def refuse(self) -> None:
        """Refuse a run that was stopped too often before its first step. Raises UserError 422."""
        if self._count() >= MOST:
            raise UserError(422, f"the run was stopped before its first step {MOST} times", _DO, where=self._path)

    def add(self, reason: str) -> None:
        """Count one more. Raises UserError 422: there are now too many.

        Args:
            reason: a phrase such as "stopped by SIGTERM".
        """
        count = self._count() + 1
        # A full disk loses the count, not the reason why the run ends.
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.write(f"{reason} before the first step\n")
        if count >= MOST:
            what = f"{reason} before the first step, {count} times in a row: not started again"
            raise UserError(422, what, _DO, where=self._path)

    def forget(self) -> None:
        """Remove the file, after a completed step."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _count(self) -> int:
        return len(self._path.read_text(errors="replace").splitlines()) if self._path.is_file() else 0
