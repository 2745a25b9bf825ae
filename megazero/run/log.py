"""Keep a rank's log in the run's folder.

Records of a job that builds are held back until the job has something to do, or until an error: a job that finds its
run finished leaves the log as it was, byte for byte.
"""

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.reading import open_regular
from megazero.launcher.stacks import Stacks
from megazero.observe.sinks import warn
from megazero.run.run import Run


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Warn that a line is lost: a log does not end a run."""
        warn(f"a line of {self.baseFilename} is lost (disk full?)")


class RunLog(MemoryHandler):
    """A log handler that appends to a file that must be there; records before `begin` wait for it, or for an error.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path):
        with open_regular(path):  # a FIFO in its place would block for ever
            file = _File(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        super().__init__(sys.maxsize, target=file, flushOnClose=False)
        self._path = path

    def begin(self) -> None:
        """Write what was held back, and from now on everything at once."""
        self.flushLevel = logging.NOTSET
        self.flush()

    def forget(self) -> None:
        """Drop what was held back, and a file in which nothing stands."""
        self.buffer.clear()
        if not self._path.stat().st_size:
            self._path.unlink()

    def close(self) -> None:
        """Close the file."""
        file = self.target
        super().close()
        if file is not None:
            file.close()


def settle_in(run: Run, stacks: Stacks) -> RunLog:
    """Open this rank's log in rank 0's folder, for records and for stacks.

    Raises:
        UserError: 401, this rank cannot write there.
    """
    rank = run.grid["world"].rank
    try:
        path = run.folder.log(rank)
        if not path.exists():  # what is there keeps its time
            path.touch()
        handler = RunLog(path)
        stacks.into(path)
    except OSError as error:
        what = f"rank 0 made the folder, rank {rank} cannot write to it: {error.strerror}"
        do = "every host must see run.dir; give one on a shared disk"
        raise UserError(401, what, do, where=run.folder.path) from None
    log = logging.getLogger("megazero")
    log.setLevel(logging.INFO)
    for earlier in list(log.handlers):  # of another run in this process
        log.removeHandler(earlier)
        earlier.close()
    log.addHandler(handler)
    return handler
