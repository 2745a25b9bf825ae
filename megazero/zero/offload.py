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
from megazero.zero.placement import FlatBuffer, redistribute


@dataclass(frozen=True, eq=False)
class Offload:
    """Which kinds of a unit's values rest on the host.

    Attributes:
        host: whose memory is apart from the device's; None: nothing rests there.
        optimizer, parameters: what does.
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
        buffer: all of them.
        begun: they hold something of this step.
        wait: returns when nobody reads those of the step before any more.
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
