"""Count the starts of a run that are stopped before its first step, and stop restarting it after three.

Each such start asks to be started again (exit code 75) and changes nothing, so a queue would go on for ever. So such
starts are counted, in a file of the run's folder, which outlives launchers and hosts. The first completed step removes
it; at the third start in a row the run fails, and fails at once from then on until the file is removed.
"""

import contextlib
import re
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.base.reading import UnexpectedFileError, read_file

MOST = 3
_DO = "give it time to build, see who signals it, and remove the file to try again"
_LONGEST = 200  # bytes of the file


class EarlyStops:
    """The count of starts in a row that were stopped before the first step.

    Args:
        path: the file of the count.
    """

    def __init__(self, path: Path):
        self._path = path

    def refuse(self) -> None:
        """Refuse to start. Raises UserError: 422, it has been stopped too often, or the file is none of ours."""
        if self._count() >= MOST:
            raise UserError(422, f"stopped before its first step {MOST} times in a row", _DO, where=self._path)

    def add(self, reason: str) -> None:
        """Count one more. Raises UserError: 422, that is too many.

        Args:
            reason: as one says it: "stopped by SIGTERM".
        """
        count = self._count() + 1
        text = f"{count} start{'s' * (count > 1)} in a row stopped before the first step, the last one {reason}\n"
        with contextlib.suppress(OSError):  # a disk that is full does not make a save of nothing fail
            replace_file(self._path, text.encode()[:_LONGEST])
        if count >= MOST:
            what = f"{reason} before the first step, {count} times in a row: not started again"
            raise UserError(422, what, _DO, where=self._path)

    def forget(self) -> None:
        """Remove the count: a step has been completed."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _count(self) -> int:
        try:
            text = read_file(self._path, _LONGEST, follow=False)
        except FileNotFoundError:
            return 0
        except UnexpectedFileError:
            text = b""  # no count either
        except OSError as error:
            raise UserError(422, f"cannot be read: {error.strerror}", "remove it", where=self._path) from None
        match = re.fullmatch(rb"([1-9][0-9]{0,3}) starts? in a row stopped before the first step, [ -~]+\n", text)
        if match is None:
            raise UserError(422, "is no count of early stops, or damaged", "remove it", where=self._path)
        return int(match[1])
