"""List the extensions of ZeRO that a config may ask for.

An extension that is taken out of the list, with its module, is gone; nothing else imports it.
"""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

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

# By the option that asks for it, in the order in which they wrap each other: second shards keep what quantised gathers
# send.
EXTENSIONS: dict[str, Make] = {"zero.quantize": quantized, "zero.secondary_ranks": second_shards}


def extensions_of(
    config: Config, grid: Grid, ops: Operations, precision: Precision, device: torch.device
) -> list[Extension]:
    """Return the extensions that a config asks for, on a rank of a grid that computes on a device.

    Raises:
        UserError: 104, it asks for one that is not in the table.
    """
    zero = config.zero
    asked = {
        "zero.quantize": (zero.quantize.parameters, zero.quantize.gradients) != ("none", "none"),
        "zero.secondary_ranks": zero.secondary_ranks is not None,
    }
    if absent := [option for option, asks in asked.items() if asks and option not in EXTENSIONS]:
        raise UserError(104, f"{absent[0]}: this copy of megazero has no such extension", "leave the option out")
    near, memory = grid["shard"], grid.comm.shared_memory
    # Neighbours talk through memory only where all data ranks do: else a rank that waits for a socket of the one axis
    # could be waited for by one that waits for memory of the other.
    if memory is not None and not memory.reached.issuperset(grid["data"].ranks):
        near = replace(near, comm=replace(near.comm, shared_memory=None))
    axes = near, grid["replica"]  # made once: an axis may have memory for its messages
    made = (make(config, grid, axes, ops, precision, device) for make in EXTENSIONS.values())
    return [extension for extension in made if extension is not None]
