"""Run Python's cyclic garbage collector only after chosen steps, equal on all ranks.

Automatic collections start inside a step, in different steps on different ranks, and each time the other ranks wait.
Objects built before the first step live to the end of the run: they are frozen, so later collections skip them.
"""

import gc
from typing import Self

EVERY = 50  # steps


class GarbageCollection:
    """Context in which only `after` runs the garbage collector; its previous mode is restored on exit."""

    def __enter__(self) -> Self:
        self._was_on = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def after(self, done: int, *, rests: bool) -> None:
        """Collect if step `done` (from 1) is a multiple of `EVERY`, or if the device `rests` (validation, save)."""
        if rests or done % EVERY == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._was_on:
            gc.enable()
