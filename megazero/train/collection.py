"""Run Python's cyclic garbage collector at chosen steps only, the same on every rank.

A collection that begins by itself does so in the middle of some step, on each rank in another one, and every time the
others wait. What was built before the first step stays to the end: frozen, it takes no time in any later collection.
"""

import gc
from typing import Self

EVERY = 50  # steps


class GarbageCollection:
    """The collector in the hands of the loop, inside the context; outside it is as it was before."""

    def __enter__(self) -> Self:
        self._was_on = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def after(self, done: int, *, rests: bool) -> None:
        """Collect after step `done` (from 1) if it is its turn, or if the device rests there: a validation, a save."""
        if rests or done % EVERY == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._was_on:
            gc.enable()
