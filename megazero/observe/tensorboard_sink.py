"""Write rows as TensorBoard scalars, one series per key over the step, for `tensorboard --logdir RUN/tensorboard`.

The package is optional. If the config asks for it and it is missing, that is reported at the start of the run. A fault
of the folder is raised by the first row, where it cannot stop the run (sinks.py). A thread of the package writes the
event files; training involves no server.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from megazero.base.packages import refuse_sinks
from megazero.observe.metrics import Value, scalars
from megazero.observe.sinks import Sink


class TensorboardSink(Sink):
    """A sink that writes event files into `folder`, which the first row creates if it is missing.

    Raises:
        UserError: MZ-161, the package is not installed.
    """

    def __init__(self, folder: Path):
        refuse_sinks(tensorboard=True)
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._open: Callable[[], SummaryWriter] = lambda: SummaryWriter(str(folder))
        self._writer: SummaryWriter | None = None

    def row(self, row: Mapping[str, Value]) -> None:
        """Add every number of the row at its step, and flush them."""
        if self._writer is None:
            self._writer = self._open()
        step = row["step"]
        for key, value in scalars(row).items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and end the event file, if there is one."""
        if self._writer is not None:
            self._writer.close()
