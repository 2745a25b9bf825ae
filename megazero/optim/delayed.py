"""The host updates while the device computes the next step (one-step delayed update: Ren et al. 2021, ZeRO-Offload,
arXiv 2101.06840, section 5.2).

    step k        forward and backward with the parameters of update k - 2, while the host does update k - 1
    its end       update k - 1 is published, update k begins

(counting from 1: the first two steps see the initial parameters.) Gradients are one update older than the parameters
that they change, which is another algorithm, if one that the paper finds to converge alike; everything else is as ever.
Where a checkpoint is written nothing is delayed: `catch_up` publishes what is under way. A run that goes on from it
does so where the first one saved, and both compute the same from there. Validation sees what the next step computes
with.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future

import torch

from megazero.zero.unit import Unit


class Delayed:
    """Updates under way.

    Args:
        publish: sends a unit's updated parameters to where forward and backward see them.
        thread: of the host.
    """

    def __init__(self, publish: Callable[[Unit], None], thread: Executor):
        self._publish, self._thread = publish, thread
        self._under_way: list[tuple[Unit, Future[None]]] = []

    def begin(self, units: list[Unit], update: Callable[[Unit], None]) -> None:
        """The units are updated in the background, one after the other: the last first, as backward needs the places
        of their gradients. Nothing may be under way, nor be on its way from where an update writes.
        """
        assert not self._under_way
        self._under_way = [(unit, self._thread.submit(_quietly, update, unit)) for unit in reversed(units)]
        for unit, done in self._under_way:
            assert unit.host_gradients is not None, "the host updates"
            unit.host_gradients.wait = done.result  # its gradients are read until then

    def flush_delayed(self) -> None:
        """Nothing is under way when this returns. Every rank calls it."""
        for unit, done in reversed(self._under_way):
            done.result()
            self._publish(unit)
        self._under_way = []


def _quietly(update: Callable[[Unit], None], unit: Unit) -> None:
    with torch.no_grad():
        update(unit)
