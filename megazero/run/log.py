"""Keep a rank's log in the run's folder."""

import logging

from megazero.base.files import writing
from megazero.base.reading import open_regular
from megazero.launcher.stacks import Stacks
from megazero.observe.sinks import warn
from megazero.run.run import Run


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Warn that a line is lost, because a log must not end a run."""
        warn(f"a line of {self.baseFilename} is lost (disk full?)")


def settle_in(run: Run, stacks: Stacks) -> None:
    """Open this rank's log in the folder that rank 0 made, for records and for stacks.

    Raises:
        UserError: 401, this rank cannot write there.
    """
    rank = run.grid["world"].rank
    path = run.folder.log(rank)
    what, do = f"rank 0 made the folder, rank {rank} cannot write to it", "every host must see run.dir"
    with writing(run.folder.path, 401, f"{do}; give one on a shared disk", what):
        path.touch()
        with open_regular(path):  # a FIFO in its place would block for ever
            handler = _LogFile(path, encoding="utf-8")
        stacks.into(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("megazero")
    log.setLevel(logging.INFO)
    for earlier in list(log.handlers):  # of another run in this process
        log.removeHandler(earlier)
        earlier.close()
    log.addHandler(handler)
