"""List the homes of offloaded values that a config may ask for, beyond the device and the host.

A home that is taken out of the table, with its folder, is gone: no other module imports it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.comm.home import DiskSpeed, PagedHome
from megazero.comm.ledger import Ledger
from megazero.nvme.opening import open_disk, speed_of


class Disks(NamedTuple):
    """A kind of disks: how a rank opens its own, and how fast one is (`nvme/opening.py`)."""

    open: Callable[[Sequence[Path], Ledger, int, torch.device], tuple[PagedHome, str]]
    speed: Callable[[Path, int], DiskSpeed]


# By the words of `zero.offload` and `memory.offload`.
HOMES: dict[str, Disks] = {
    "nvme": Disks(open_disk, speed_of),
}
