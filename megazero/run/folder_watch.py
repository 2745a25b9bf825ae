"""Notice between saves that a run's folder is deleted, moved, or made read-only, while there is time to mend it.

A run that saves once an hour would otherwise learn at its next save that it has nowhere to write, an hour of training
later. The first rank looks about once a second, and before each save; each kind of fault is one warning, and the run
goes on, because the folder may come back before the save.
"""

import time
from collections.abc import Callable

from megazero.run.folder import RunFolder

_SELDOM = 1.0  # seconds between looks; a network's disk is asked each time


class FolderWatch:
    """A watch on a run's folder.

    Args:
        folder: the run's.
        warn: called once for each fault.
        clock: returns seconds that only go forward.
    """

    def __init__(self, folder: RunFolder, warn: Callable[[str], object], clock: Callable[[], float] = time.monotonic):
        self._folder, self._warn, self._clock = folder, warn, clock
        self._looked = clock()
        self._said: set[str] = set()

    def look(self, saving: bool = False) -> None:
        """Warn of a fault not reported before; between saves, do nothing if it has looked a moment ago."""
        if not saving and self._clock() - self._looked < _SELDOM:
            return
        self._looked = self._clock()
        try:
            fault = self._vanished() if saving else self._fault() or self._vanished()
        except OSError:  # a disk that does not answer has shown nothing
            return
        if fault is not None and fault not in self._said:
            self._said.add(fault)
            self._warn(f"{self._folder.path}: {fault}")

    def _fault(self) -> str | None:
        if (fault := self._folder.fault()) is not None:
            return f"{fault}; nothing can be saved unless that is mended before the next save"
        return None

    def _vanished(self) -> str | None:
        """Return the fault that a save mends, and would not tell; of all others it is a save that fails that tells."""
        if self._folder.path.is_dir() and not self._folder.checkpoints.is_dir():
            return "checkpoints/ was deleted or moved, with the steps in it; the next save makes it anew"
        return None
