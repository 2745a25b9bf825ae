"""Count the starts of a run that are stopped before its first step, and stop restarting it after three.

Each such start asks to be restarted (exit code 75) and changes nothing, so a queue would restart it for ever. The count
is a file in the run's folder. The first completed step removes it. From the third such start in a row on, the run fails
until the file is removed.
"""

import contextlib
import re
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.files import replace_file

MOST = 3
_DO = "give the run more time to start, find out what signals it, and remove this file to try again"


class EarlyStops:
    """The count of starts in a row that were stopped before the first step.

    Args:
        path: the file of the count.
    """

    def __init__(self, path: Path):
        self._path = path

    def refuse(self) -> None:
        """Raise UserError 422 if the run has been stopped too often before its first step, or the file is no count."""
        if self._count() >= MOST:
            raise UserError(422, f"the run was stopped before its first step {MOST} times", _DO, where=self._path)

    def add(self, reason: str) -> None:
        """Count one more. Raises UserError: 422, there are now too many, or the file is not a count.

        Args:
            reason: a phrase such as "stopped by SIGTERM".
        """
        count = self._count() + 1
        text = f"{count} start{'s' * (count > 1)} in a row stopped before the first step, the last one {reason}\n"
        with contextlib.suppress(OSError):  # a full disk loses the count, not the reason why the run ends
            replace_file(self._path, text.encode())
        if count >= MOST:
            what = f"{reason} before the first step, {count} times in a row: not started again"
            raise UserError(422, what, _DO, where=self._path)

    def forget(self) -> None:
        """Remove the count, after a completed step."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _count(self) -> int:
        if not self._path.exists():
            return 0
        text = self._path.read_text(errors="replace") if self._path.is_file() else ""
        if (match := re.match(r"([1-9][0-9]?) starts? in a row", text)) is None:
            raise UserError(422, "is not a count of starts before the first step", "remove it", where=self._path)
        return int(match[1])
