"""What of a unit rests on the host (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840; stage 3 parameters: Rajbhandari et
al. 2021, ZeRO-Infinity, arXiv 2104.07857).

    zero.offload.optimizer     masters and moments, updated by the host; and, where they rest sharded, gradients
    zero.offload.parameters    the shards of stage 3

The reduced gradients of a unit are sent to the host while backward computes those of the unit before; with several
micro-batches what has gathered comes back for the next one to be added, so sums are taken where and in the order in
which they always are. After the update each unit's parameters are sent to the device while the host updates the next
unit. Nothing of this changes a bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.comm.host import Host


@dataclass(frozen=True, eq=False)
class Offload:
    """
    Attributes:
        host: where to; apart from the device.
        optimizer, parameters: what.
        delayed: updates go on beside the next step (`optim/delayed.py`).
    """

    host: Host
    optimizer: bool
    parameters: bool
    delayed: bool = False


class HostGradients:
    """The reduced gradients of one unit's shard, on the host between the reductions of a step and its update.

    Attributes:
        gradients: flat.
        begun: they hold something of this step.
        wait: returns when nobody reads those of the step before any more.
    """

    def __init__(self, host: Host, numel: int, dtype: torch.dtype):
        self._host = host
        self.gradients = host.zeros(numel, dtype, "gradients")
        self.begun = False
        self.wait: Callable[[], object] = lambda: None

    def send(self, reduced: Tensor, at: int = 0) -> None:
        """From the device, to elements [at, ...)."""
        self.wait()
        self._host.send(reduced, self.gradients[at : at + len(reduced)], "gradients")
        self.begun = True

    def bring(self, into: Tensor, at: int = 0) -> None:
        """To the device."""
        self._host.bring(self.gradients[at : at + len(into)], into, "gradients")
