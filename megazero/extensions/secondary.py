"""Keep a second shard of a stage 3 unit on n neighbours, so that most all-gathers of a step stay among them (hpZ).

    first gather of a step         from the shards of all data ranks
    later gathers of the step      from the second shards of the `zero.secondary_ranks` neighbours

Parameters do not change within a step, so the values are bit-identical; with m micro-batches and P bytes of parameters,
P instead of 2 m P cross hosts. It costs P / n more memory. Quantised parameters are kept as codes, so a backward uses
the values of its forward. (Wang et al. 2023, ZeRO++, arXiv 2306.10209, section 3.2; there each forward gathers from
all data ranks.)
"""

from __future__ import annotations  # no import of the config package: its types are only named here

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, start_all_gather_in_place
from megazero.comm.grid import Axis, Grid
from megazero.kernels.operations import Operations
from megazero.zero.extension import Extension, Gathering
from megazero.zero.placement import FlatBuffer, Placement, Precision, UnitAxes, shard_slice

if TYPE_CHECKING:
    from megazero.config.schema import Config


class SecondShard(Gathering):
    """Gathers one unit from neighbours if its parameters have not changed since the last gather.

    Args:
        far: gathers from all ranks; this rank's part of its message becomes the second shard.
        numel: elements of the unit.
        near: the neighbours.
    """

    def __init__(self, far: Gathering, numel: int, near: Axis, device: torch.device):
        self.far, self._near = far, near
        self._kept = torch.zeros(far.message_bytes(numel) // near.size, dtype=torch.uint8, device=device)
        near.comm.ledger.hold("secondary", self._kept.nbytes)
        self.reads_shard, self.rounds = True, far.rounds
        far.keep = self._keep

    def start(self, shard: FlatBuffer, whole: FlatBuffer) -> Pending:
        """Start to gather the unit, from neighbours if parameters have not changed since the last gather."""
        if self.reads_shard:
            return self.far.start(shard, whole)
        message = self.far.message(whole.values)
        self._own(message).copy_(self._kept)
        pending = start_all_gather_in_place(message, self._near, "parameters")
        return pending.then(lambda: self.far.arrive(message, whole.values))

    def forget(self) -> None:
        """Make the next gather read the shards of all ranks, because parameters have changed."""
        self.reads_shard = True

    def _keep(self, message: Tensor) -> None:
        self._kept.copy_(self._own(message))
        self.reads_shard = False

    def _own(self, message: Tensor) -> Tensor:
        """Return the part of a message that is this rank's second shard, as bytes."""
        return message[shard_slice(len(message), Placement.SHARD, self._near)].view(torch.uint8)


@dataclass(eq=False)
class SecondShards(Extension):
    """Extension that gives each sharded unit a second shard among neighbours."""

    near: Axis

    def gathering(self, plain: Gathering, numel: int, axes: UnitAxes, device: torch.device) -> Gathering:
        """Return a gathering that uses second shards."""
        return SecondShard(plain, numel, self.near, device)


def second_shards(
    config: Config, grid: Grid, axes: tuple[Axis, Axis], ops: Operations, precision: Precision, device: torch.device
) -> Extension | None:
    """Return the extension for `zero.secondary_ranks`; None if it is unset or each rank has no neighbour."""
    near, _ = axes
    return None if config.zero.secondary_ranks is None or near.size == 1 else SecondShards(near)
