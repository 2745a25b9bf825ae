"""Choose where a sharded module's state is kept and how it is sent, by the options of a config's section `zero`.

    offload           "cpu" or "nvme", or {"optimizer": ..., "parameters": ..., "path": ..., "host_mb": ...}
    quantize          {"parameters": "int8", "gradients": "int8" or "int4", "error_feedback": ...}
    secondary_ranks   second shards among this many neighbouring ranks

docs/configuration.md describes them; the rules between them are those of a config.
"""

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megazero.base.errors import UserError
from megazero.base.quantized import BLOCK
from megazero.builders.units import offload_of
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.config.file import of_values
from megazero.config.schema import Config
from megazero.extensions.homes import HOMES
from megazero.extensions.registry import extensions_of
from megazero.kernels.operations import Operations
from megazero.library.elementwise import Elementwise
from megazero.library.optimizers import Groups, Recipe
from megazero.plan.placements import ALIGNMENT
from megazero.run.disks import open_disks, ranks_here
from megazero.zero.extension import Extension
from megazero.zero.offload import Offload
from megazero.zero.placement import Precision


def options_of(
    stage: int,
    recipe: Recipe,
    groups: Groups,
    *,
    offload: str | Mapping[str, Any] | None,
    quantize: Mapping[str, Any] | None,
    shard_ranks: int | None,
    secondary_ranks: int | None,
) -> Config:
    """Return a config with the options of section `zero`, checked.

    Raises:
        UserError: 104 to 107, an unknown option, a wrong value, options that exclude each other; 510, delayed updates,
            or a torch optimizer with its state on disks.
    """
    if isinstance(offload, str):
        offload = {"optimizer": offload} | ({"parameters": offload} if stage == 3 else {})
    if (offload or {}).get("delayed"):
        raise UserError(510, "offload: delayed updates are for runs only", "leave delayed out", where="shard")
    options: dict[str, Any] = {"stage": stage, "offload": dict(offload or {}), "quantize": dict(quantize or {})}
    options |= {"secondary_ranks": secondary_ranks, "shard_ranks": shard_ranks if stage else None}
    others = tuple({"match": pattern, "name": own["name"]} for pattern, own in groups if "name" in own) or None
    of_torch = recipe.name == Elementwise.KIND
    optimizer = {"name": "adamw" if of_torch else recipe.name, "groups": others}
    config = of_values({"zero": options, "optimizer": optimizer}, "shard")
    if of_torch and config.zero.offload.optimizer == "nvme":
        do = 'give "adamw", "lion" or "sgd"'
        raise UserError(510, "offload: the state of torch's optimizers cannot be on disks", do, where="shard")
    return config


@dataclass(frozen=True)
class Tiers:
    """Where state is kept and how it is sent.

    Attributes:
        config: from `options_of`.
        offload: the homes of values that do not rest on the device.
    """

    config: Config
    grid: Grid
    device: torch.device
    offload: Offload
    _made: dict[Precision, list[Extension]] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Config, grid: Grid, device: torch.device) -> "Tiers":
        """Return the tiers of this rank; open its disks. Raises UserError 6xx: the disks cannot be used."""
        ledger, here = grid.comm.ledger, ranks_here(config, grid, device)
        if (disks := open_disks(HOMES, config, device, ledger, here)) is not None:
            atexit.register(disks.close)
        return cls(config, grid, device, offload_of(config, Host(device, ledger), {"nvme": disks} if disks else {}))

    def extensions(self, precision: Precision, ops: Operations) -> Sequence[Extension]:
        """Return the extensions of units with these dtypes."""
        if not precision.parameters.is_floating_point:
            return ()
        if precision not in self._made:
            self._made[precision] = extensions_of(self.config, self.grid, ops, precision, self.device)
        return self._made[precision]

    @property
    def all_extensions(self) -> list[Extension]:
        """Return the extensions of all units made so far."""
        return [extension for made in self._made.values() for extension in made]

    @property
    def alignment(self) -> int:
        """Return the alignment of parameters in elements."""
        quantize = self.config.zero.quantize
        return ALIGNMENT if (quantize.parameters, quantize.gradients) == ("none", "none") else BLOCK
