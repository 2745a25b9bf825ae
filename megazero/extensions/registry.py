"""List the extensions of ZeRO that a config may ask for.

An extension that is taken out of the list, with its module, is gone; nothing else imports it.
"""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megazero.comm.grid import Axis, Grid
from megazero.extensions.neighbours import near_and_far
from megazero.extensions.quantized import quantized
from megazero.extensions.secondary import second_shards
from megazero.kernels.operations import Operations
from megazero.zero.extension import Extension
from megazero.zero.placement import Precision

if TYPE_CHECKING:
    from megazero.config.schema import Config

Make = Callable[["Config", Grid, tuple[Axis, Axis], Operations, Precision, torch.device], Extension | None]

# In the order in which they wrap each other: second shards keep what quantised gathers send.
EXTENSIONS: tuple[Make, ...] = (
    quantized,
    second_shards,
)


def extensions_of(
    config: Config, grid: Grid, ops: Operations, precision: Precision, device: torch.device
) -> list[Extension]:
    """Return the extensions that a config asks for, on a rank of a grid that computes on a device."""
    axes = near_and_far(grid)  # once: an axis may have memory for its messages
    made = (make(config, grid, axes, ops, precision, device) for make in EXTENSIONS)
    return [extension for extension in made if extension is not None]
