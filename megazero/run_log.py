"""The log of one rank of a run: logs/rank_00.log in its folder."""

import logging

from megazero.observe.sinks import warn
from megazero.reading import open_regular
from megazero.run_folder import RunFolder


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        warn(f"a line of {self.baseFilename} is lost (disk full?)")


def log_of(folder: RunFolder, rank: int) -> logging.Logger:
    """Open a rank's log, in place of an earlier run's of this process. Raises OSError."""
    log = logging.getLogger("megazero")
    log.setLevel(logging.INFO)
    for handler in list(log.handlers):  # of an earlier run in this process
        log.removeHandler(handler)
        handler.close()
    path = folder.log(rank)
    path.touch()
    with open_regular(path):  # a FIFO in its place would block for ever
        handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    return log
