"""Checkpoints as training sees them: begun, settled before the next update, finished on all ranks or on none."""

import time

import torch

from megazero.checkpoint.manifest import Progress
from megazero.checkpoint.save import Saver
from megazero.errors import UserError
from megazero.parallel.agreement import agree
from megazero.parallel.collectives import all_gather
from megazero.parallel.grid import Axis

# Seconds that a rank waits for its own disk before it meets the others again: disks differ, and no rank is to wait in
# a collective for as long as another's takes.
_SLICE = 1.0


class Checkpoints:
    """Saves on all ranks alike.

    Args:
        saver: of this rank.
        world: all ranks.
        every: steps between checkpoints; None: only when asked.
        background: training goes on while files are written.

    Attributes:
        saved: the last step that was begun, or that the run went on from.
        seconds: that the last one took, from its beginning to its commit.
    """

    def __init__(self, saver: Saver, world: Axis, device: torch.device, *, every: int | None, background: bool):
        self._saver, self._world, self._device = saver, world, device
        self._every, self._background = every, background
        self.saved: int | None = None
        self.seconds = 0.0
        self._began = 0.0

    def due(self, done: int) -> bool:
        """Whether a checkpoint belongs behind step `done`, counted from 1."""
        return self._every is not None and done % self._every == 0

    def save(self, done: int, progress: Progress) -> None:
        """Saves the state behind step `done`; nothing where that has been saved already. Every rank calls it.

        Raises:
            UserError: 403, this step, or the one begun before, could not be written.
            FailedElsewhere: by another rank.
        """
        if self.saved == done:
            return
        self.finish()
        self.saved, self._began = done, time.monotonic()
        self._saver.begin(done, progress)
        if not self._background:
            self.finish()

    def settle(self) -> None:
        """Before an update."""
        self._saver.settle()

    @property
    def failed(self) -> bool:
        """This rank has something to tell the others: `finish` will."""
        return self._saver.failed

    def finish(self) -> None:
        """What was begun is committed when this returns. Every rank calls it; errors as of `save`."""
        if self.saved is None or not self._saver.busy:
            return
        ended = False
        while not ended:
            own = self._saver.wait(_SLICE)
            # One that failed is not waited for any longer.
            flags = torch.tensor([[own, self._saver.failed]], dtype=torch.int64, device=self._device)
            all_own, any_failed = all_gather(flags, self._world, "agree").unbind(1)
            ended = bool(all_own.all() | any_failed.any())
        if any_failed.any():
            self._saver.give_up()
        try:
            agree(self._world, self._device, self._saver.finish)
        except UserError:  # nobody writes any more
            self._saver.store.abandon(self.saved)
            raise
        self.seconds = time.monotonic() - self._began

    def close(self, *, tidy: bool) -> None:
        """Ends what goes on in the background, after old steps have been deleted if `tidy`."""
        self._saver.close(tidy=tidy)
