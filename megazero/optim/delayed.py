"""Update on the host while the device computes the next step (one-step delayed update).

    step k        forward and backward with the parameters of update k - 2, while the host computes update k - 1
    its end       update k - 1 is published, update k starts

(counting from 1: the first two steps see the initial parameters. Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840,
section 5.2.) Gradients are computed with parameters that are one update older than those that they change. That is
another algorithm, which the paper finds to converge alike. Before a checkpoint is written, `flush_delayed` waits for
the update under way and publishes it, so a run that resumes there and the one that saved compute the same. Validation
uses the parameters of the next step.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch

from megazero.zero.unit import Unit


class Delayed:
    """The update under way on the host, in a thread of its own.

    Args:
        publish: sends a unit's updated parameters to where forward and backward see them.
    """

    def __init__(self, publish: Callable[[Unit], None]):
        self._publish = publish
        self.thread: Executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="update")
        self._under_way: list[tuple[Unit, Future[None]]] = []

    def begin(self, units: list[Unit], update: Callable[[Unit], None]) -> None:
        """Start to update units in the background, one after the other.

        The last unit comes first, because backward writes its gradients first. No update may be under way, and no
        copy out of the memory that an update writes to.

        Args:
            update: updates one unit.
        """
        assert not self._under_way
        quietly = torch.no_grad()(update)
        self._under_way = [(unit, self.thread.submit(quietly, unit)) for unit in reversed(units)]
        for unit, done in self._under_way:
            unit.gradients.wait = done.result  # its gradients are read until then

    def flush_delayed(self) -> None:
        """Wait for the update under way and publish it. Every rank calls it."""
        for unit, done in reversed(self._under_way):
            done.result()
            self._publish(unit)
        self._under_way = []
