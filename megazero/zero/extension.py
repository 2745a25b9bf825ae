"""Let extensions replace how the values of units are sent between ranks; this package does not depend on them.

A unit gathers its parameters by a `Gathering` and sums its gradients by a `Summing`. The two classes here send values
unchanged between all ranks of the shard axis. An extension replaces them, unit by unit, and may wrap those of the
extension before it. Offload is not an extension: a `Home` holds offloaded values (`comm/home.py`).

The extensions of a run are listed in `extensions/registry.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.comm.collectives import Pending
from megazero.comm.grid import Axis
from megazero.comm.pool import Pool
from megazero.plan.placements import ALIGNMENT
from megazero.zero.placement import FlatBuffer, UnitAxes, redistribute


class Gathering:
    """Gather the parameters of one unit from the shards of all ranks, unchanged.

    Attributes:
        keep: called with the messages of all ranks, joined in rank order, when they have arrived; None: no call.
        reads_shard: the next gather reads this rank's shard from where it rests.
        rounds: values arrive rounded.
    """

    rounds = False

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self.keep: Callable[[Tensor], object] | None = None
        self.reads_shard = True

    def start(self, shard: FlatBuffer, whole: FlatBuffer) -> Pending:
        """Start to gather the shards of all ranks into `whole`; `shard` is this rank's."""
        pending = redistribute(shard, whole, "parameters")
        return pending if self.keep is None else pending.then(lambda: self._noted(whole.values))

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of the messages of all ranks for a unit of `numel` elements."""
        return numel * self._dtype.itemsize

    def message(self, whole: Tensor) -> Tensor:
        """Return memory for the messages of all ranks, to be filled for `arrive`."""
        return whole

    def arrive(self, message: Tensor, whole: Tensor) -> Tensor:
        """Write the values of a message to `whole`; return `whole`. The message must not be used afterwards."""
        return whole

    def forget(self) -> None:
        """Record that the parameters have changed since the last gather."""

    def _noted(self, message: Tensor) -> Tensor:
        if self.keep is not None:
            self.keep(message)
        return message


class Summing:
    """Sum the gradients of one unit over all ranks of the shard axis, unchanged.

    Args:
        through: buffers of the dtype in which the sum is taken; None: the sum is taken in the gradients' dtype.

    Attributes:
        rounds: each rank's gradients arrive rounded.
        hops: the two axes along which sums are taken one after the other; None: one sum over the shard axis.
    """

    rounds = False
    hops: tuple[Axis, Axis] | None = None

    def __init__(self, through: Pool | None):
        self._through = through

    def start(self, partial: FlatBuffer, own: FlatBuffer, *, accumulate: bool) -> Pending:
        """Start to sum `partial` over all ranks; `own` gets the part that this rank updates.

        Args:
            accumulate: `own` holds earlier sums of this step; add this one.
        """
        return redistribute(partial, own, "gradients", accumulate=accumulate, through=self._through)


class Extension:
    """Change how the units of a run are sent. The methods here change nothing.

    Attributes:
        alignment: every parameter begins at a multiple of so many elements of its unit.
    """

    alignment = ALIGNMENT

    def gathering(self, plain: Gathering, numel: int, axes: UnitAxes, device: torch.device) -> Gathering:
        """Return `plain` or a gathering that replaces it, for a unit of `numel` elements that does not rest whole."""
        return plain

    def summing(self, plain: Summing, shard: slice, axes: UnitAxes) -> Summing:
        """Return `plain` or a summing that replaces it, for a unit whose elements `shard` this rank updates."""
        return plain

    def end_step(self, skipped: Tensor, scale: Tensor, next_scale: Tensor) -> None:
        """Handle the end of a step: whether its update is skipped, its loss scale and the next; all on the device."""

    def forget(self) -> None:
        """Drop the state kept from step to step: a run that resumes from a checkpoint has none either."""
