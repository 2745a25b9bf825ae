"""Keep masters, moments, gradients or parameter shards of a unit in the memory of the host.

    zero.offload.optimizer     masters and moments, updated by the host; and, where they rest sharded, gradients
    zero.offload.parameters    the shards of stage 3

(Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840; stage 3 parameters: Rajbhandari et al. 2021, ZeRO-Infinity, arXiv
2104.07857.)

The reduced gradients of a unit are sent to the host while backward computes those of the unit before. With several
micro-batches the accumulated sum comes back, and the next micro-batch's is added on the device, so sums are taken in
the same place and order as without offload. After the update each unit's parameters are sent to the device while the
host updates the next unit. Results are the same bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.comm.host import Host
from megazero.zero.placement import FlatBuffer, redistribute


@dataclass(frozen=True, eq=False)
class Offload:
    """The choice of a unit's values that rest on the host.

    Attributes:
        host: the host, whose memory is apart from the device's; None: nothing rests there.
        optimizer, parameters: whether these rest there.
        delayed: updates go on beside the next step (`optim/delayed.py`).
    """

    host: Host | None
    optimizer: bool = False
    parameters: bool = False
    delayed: bool = False

    @property
    def updater(self) -> Host | None:
        """Return the host that updates, or None: the device does."""
        return self.host if self.optimizer else None

    @property
    def parameters_home(self) -> Host | None:
        """Return the host on which the parameters rest, or None: they rest on the device."""
        return self.host if self.parameters else None


class HostGradients:
    """The reduced gradients of one unit's shard, on the host between the reductions of a step and its update.

    Attributes:
        buffer: the shard's gradients.
        begun: the buffer holds gradients of this step.
        wait: returns when nobody reads the gradients of the step before any more.
    """

    def __init__(self, host: Host, shard: slice, dtype: torch.dtype):
        self.buffer = FlatBuffer(host.zeros(shard.stop - shard.start, dtype, "gradients"), {}, 0, host)
        self.begun = False
        self.wait: Callable[[], object] = lambda: None

    def send(self, reduced: Tensor, at: int = 0) -> None:
        """Copy from the device to elements [at, ...)."""
        self.wait()
        redistribute(FlatBuffer(reduced, {}, at), self.buffer, "gradients")
        self.begun = True

    def bring(self, into: Tensor, at: int = 0) -> None:
        """Copy elements [at, ...) to the device."""
        redistribute(self.buffer.part(slice(at, at + len(into))), FlatBuffer(into, {}, at), "gradients")
