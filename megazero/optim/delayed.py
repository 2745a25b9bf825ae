"""Update on the host while the device computes the next step (one-step delayed update).

    step k        forward and backward with the parameters of update k - 2, while the host computes update k - 1
    its end       update k - 1 is published, update k starts

(Counted from 1: the first two steps use the initial parameters. Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840,
section 5.2.) Gradients are computed with parameters one update older than the parameters that they change. This is a
different algorithm; the paper finds that it converges equally well. Before a checkpoint is written, `flush_delayed`
waits for the update under way and publishes it, so the saving run and a run that resumes there compute equal values.
Validation uses the parameters of the next step.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch

from megazero.zero.unit import Unit


class Delayed:
    """Runs updates on the host in a background thread.

    Args:
        publish: copies a unit's updated parameters to the parameters of forward and backward.
    """

    def __init__(self, publish: Callable[[Unit], None]):
        self._publish = publish
        self.thread: Executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="update")
        self._under_way: list[tuple[Unit, Future[None]]] = []

    def begin(self, units: list[Unit], update: Callable[[Unit], None]) -> None:
        """Start to update units in the background, one after the other.

        The last unit is updated first, because the next backward writes its gradients first. No other update may be
        under way, and no copy from the memory that an update writes to.

        Args:
            update: updates one unit.
        """
        assert not self._under_way
        quietly = torch.no_grad()(update)
        self._under_way = [(unit, self.thread.submit(quietly, unit)) for unit in reversed(units)]
        for unit, done in self._under_way:
            unit.gradients.wait = done.result  # until then the update reads its gradients

    def flush_delayed(self) -> None:
        """Wait for the update under way and publish it. Collective."""
        for unit, done in reversed(self._under_way):
            done.result()
            self._publish(unit)
        self._under_way = []
