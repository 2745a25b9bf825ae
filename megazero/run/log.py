"""Keep a rank's log in the run's folder.

What is logged while a job builds is held back until it is known that the job has something to do, or until an error:
a job that finds its run finished leaves the log as it was, byte for byte.
"""

import logging
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.reading import open_regular
from megazero.launcher.environment import RankContext
from megazero.observe.sinks import warn
from megazero.run.folder import RunFolder


class RunLog(logging.FileHandler):
    """A log handler that appends to a file that must be there; records before `begin` wait for it, or for an error.

    Args:
        made: this job has made the file.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path, *, made: bool = False):
        with open_regular(path):  # a FIFO in its place would block for ever
            super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._held: list[logging.LogRecord] | None = []
        self._path, self._made = path, made

    def begin(self) -> None:
        """Write what was held back, and from now on everything at once."""
        held, self._held = self._held, None
        for record in held or ():
            super().emit(record)

    def forget(self) -> None:
        """Drop what was held back, and the file if this job has made it and nothing is in it."""
        self._held = []
        if self._made and not self._path.stat().st_size:
            self._path.unlink()

    def emit(self, record: logging.LogRecord) -> None:
        """Write or hold back a record."""
        if self._held is not None and record.levelno < logging.ERROR:
            self._held.append(record)
            return
        self.begin()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn that a line is lost: a log does not end a run."""
        warn(f"a line of {self.baseFilename} is lost (disk full?)")


def settle_in(folder: RunFolder, place: RankContext) -> RunLog:
    """Open this rank's log in rank 0's folder.

    Raises:
        UserError: 401, this rank cannot write there.
    """
    try:
        path = folder.log(place.world.rank)
        made = not path.exists()
        if made:
            path.touch()
        log = _opened(path, made=made)
        place.stacks.into(path)
        return log
    except OSError as error:
        what = f"rank 0 made the folder, rank {place.world.rank} cannot write to it: {error.strerror}"
        raise UserError(
            401, what, "every host must see run.dir; give one on a shared disk", where=folder.path
        ) from None


def _opened(path: Path, *, made: bool) -> RunLog:
    log = logging.getLogger("megazero")
    log.setLevel(logging.INFO)
    for handler in list(log.handlers):  # of an earlier run in this process
        log.removeHandler(handler)
        handler.close()
    handler = RunLog(path, made=made)
    log.addHandler(handler)
    return handler
