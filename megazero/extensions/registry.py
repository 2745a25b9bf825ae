"""List the extensions of ZeRO that a config can enable.

To remove an extension, delete its table entry and its module: no other module imports it.
"""

from __future__ import annotations  # no import of the config package: its types are only named here

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megazero.base.errors import UserError
from megazero.comm.grid import Axis, Grid
from megazero.extensions.quantized import quantized
from megazero.extensions.secondary import second_shards
from megazero.kernels.operations import Operations
from megazero.zero.extension import Extension
from megazero.zero.placement import Precision

if TYPE_CHECKING:
    from megazero.config.schema import Config

Make = Callable[["Config", Grid, tuple[Axis, Axis], Operations, Precision, torch.device], Extension | None]

# By the option that enables it, innermost first: a later extension wraps the earlier ones, so second shards keep the
# codes of quantised gathers.
EXTENSIONS: dict[str, Make] = {"zero.quantize": quantized, "zero.secondary_ranks": second_shards}


def extensions_of(
    config: Config, grid: Grid, ops: Operations, precision: Precision, device: torch.device
) -> list[Extension]:
    """Return the extensions that a config enables, for this rank of a grid and its device.

    Raises:
        UserError: 104, an enabled extension is not in the table.
    """
    zero = config.zero
    asked = {
        "zero.quantize": (zero.quantize.parameters, zero.quantize.gradients) != ("none", "none"),
        "zero.secondary_ranks": zero.secondary_ranks is not None,
    }
    if absent := [option for option, asks in asked.items() if asks and option not in EXTENSIONS]:
        raise UserError(104, f"{absent[0]}: this copy of megazero has no such extension", "leave the option out")
    near, memory = grid["shard"], grid.comm.shared_memory
    # Use shared memory between neighbours only if all data ranks share it: with sockets on one axis and memory on the
    # other, two ranks could wait for each other on different axes.
    if memory is not None and not memory.reached.issuperset(grid["data"].ranks):
        near = replace(near, comm=replace(near.comm, shared_memory=None))
    axes = near, grid["replica"]  # created once, because an axis may own memory for its messages
    made = (make(config, grid, axes, ops, precision, device) for make in EXTENSIONS.values())
    return [extension for extension in made if extension is not None]
