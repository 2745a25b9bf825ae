"""Keep a second shard of a stage 3 unit near, so that most gathers of a step stay among neighbours (hpZ).

    the first gather of a step      from the shards of all data ranks
    every other one of the step     from the second shards of `zero.secondary_ranks` neighbours

Parameters do not change within a step, so values are the same bit for bit, and what crosses hosts is P in the place of
2 m P. It costs 1/n of the parameters more memory. Quantised parameters are kept as codes: a backward computes with the
values of its forward. (Wang et al. 2023, ZeRO++, arXiv 2306.10209, section 3.2; there each forward gathers from all.)
"""

from dataclasses import replace

import torch
from torch import Tensor

from megazero.comm.collectives import Pending
from megazero.comm.grid import Axis
from megazero.zero.placement import FlatBuffer, Placement, UnitAxes, redistribute, shard_slice
from megazero.zero.quantized import Quantizer


class SecondaryShard:
    """The second shard of one unit's parameters.

    Args:
        numel: elements of the whole unit.
        shard: the axis along which parameters rest.
        near: the neighbours of that axis.
        quantizer: as which parameters are sent; None: as they are.

    Attributes:
        fresh: what is kept are the parameters of now.
    """

    def __init__(
        self,
        numel: int,
        shard: Axis,
        near: Axis,
        dtype: torch.dtype,
        device: torch.device,
        quantizer: Quantizer | None,
    ):
        self._near, self._quantizer, self.fresh = near, quantizer, False
        if quantizer is None:
            self._kept = torch.zeros(numel // near.size, dtype=dtype, device=device)
        else:
            self._kept = torch.zeros(quantizer.bytes_of(numel, shard) // near.size, dtype=torch.uint8, device=device)
        near.comm.ledger.hold("secondary", self._kept.nbytes)

    def start_unshard(self, shard: FlatBuffer, whole: FlatBuffer, purpose: str) -> Pending:
        """Start to gather the unit, from neighbours if parameters are those of the last gather."""
        if self.fresh and self._quantizer is not None:
            (axis,) = shard.placements
            return self._quantizer.start_gather_codes(self._kept, self._near, whole.values, axis, purpose)
        if self.fresh:
            own = shard_slice(len(whole), Placement.SHARD, self._near)
            return redistribute(FlatBuffer(self._kept, {self._near: Placement.SHARD}, own.start), whole, purpose)
        if self._quantizer is not None:
            return redistribute(shard, whole, purpose, quantizer=replace(self._quantizer, keep=self._keep))
        pending = redistribute(shard, whole, purpose)
        return pending.then(lambda: self._kept_of(whole.values))

    def forget(self) -> None:
        """Let the next gather be the first: parameters have changed."""
        self.fresh = False

    def _kept_of(self, whole: Tensor) -> Tensor:
        self._keep(whole)
        return whole

    def _keep(self, whole: Tensor) -> None:
        """Keep this rank's part of parameters, or of their codes."""
        self._kept.copy_(whole[shard_slice(len(whole), Placement.SHARD, self._near)])
        self.fresh = True


def second_shard(
    numel: int, axes: UnitAxes, dtype: torch.dtype, device: torch.device, quantizer: Quantizer | None
) -> SecondaryShard | None:
    """Return what neighbours gather parameters from that rest sharded, if the unit has neighbours."""
    return None if axes.near.size == 1 else SecondaryShard(numel, axes.shard, axes.near, dtype, device, quantizer)
