"""Save checkpoints on all ranks: begin one, settle it before the next update, finish it on all ranks or on none."""

import math
import time

import torch

from megazero.base.errors import UserError
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.save import Saver
from megazero.comm.agreement import agree, until_all
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis


class Checkpoints:
    """The checkpoints of a run, saved on all ranks alike.

    Args:
        saver: of this rank.
        world: all ranks.
        every: steps between checkpoints; None: only on request.
        background: training goes on while files are written.

    Attributes:
        saved: the last step that was begun, or that the run went on from in its own folder.
    """

    def __init__(self, saver: Saver, world: Axis, device: torch.device, *, every: int | None, background: bool):
        self._saver, self._world, self._device = saver, world, device
        self._every, self._background = every, background
        self.saved: int | None = None

    def due(self, done: int) -> bool:
        """Return whether a checkpoint belongs behind step `done`, counted from 1."""
        return self._every is not None and done % self._every == 0

    def save(self, done: int, progress: Progress) -> None:
        """Save the state behind step `done`, unless that has been saved already. Every rank calls it.

        Raises:
            UserError: 403, this step, or the one begun before, could not be written.
            FailedElsewhere: by another rank.
        """
        if self.saved == done:
            return
        self.finish()
        self.saved = done
        self._saver.begin(done, progress)
        if not self._background:
            self.finish()

    def settle(self) -> None:
        """Wait until the update may change the tensors."""
        self._saver.settle()

    @property
    def failed(self) -> bool:
        """Return whether this rank's save has failed; `finish` raises its error."""
        return self._saver.failed

    def finish(self) -> None:
        """Wait until the save that was begun is committed. Every rank calls it; errors as of `save`."""
        if self.saved is None or not self._saver.busy:
            return
        until_all(self._world, self._device, self._written)
        try:
            agree(self._world, self._device, self._saver.finish)
        except UserError:  # nobody writes any more
            self._saver.store.abandon(self.saved)
            raise

    @property
    def seconds(self) -> float:
        """Return the seconds of a save, from its beginning to its commit."""
        return self._saver.took

    def tidy(self, patience: float = math.inf) -> None:
        """Wait until old steps have been deleted. Every rank calls it, after `finish`.

        Args:
            patience: seconds after which the rest of them is left for another job.
        """
        end = time.monotonic() + patience

        def ready(seconds: float) -> bool:
            left = end - time.monotonic()
            return self._saver.tidied(max(min(seconds, left), 0.0)) or left <= 0

        until_all(self._world, self._device, ready)

    def close(self) -> None:
        """End the background threads."""
        self._saver.close()

    def _written(self, seconds: float) -> bool:
        ended = self._saver.wait(seconds)
        failed = torch.tensor([self._saver.failed], dtype=torch.int64, device=self._device)
        if all_gather(failed, self._world, "agree").any():
            self._saver.give_up()  # rank 0 waits for parts that will not come
        return ended
