"""List the homes of offloaded values that a config may ask for, beyond the device and the host.

A home that is taken out of the table, with its folder, is gone: nothing that trains imports it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megazero.comm.home import PagedHome
from megazero.comm.ledger import Ledger
from megazero.nvme.opening import open_disk

Open = Callable[[Sequence[Path], Ledger, int, torch.device], tuple[PagedHome, str]]

# By the words of `zero.offload` and `memory.offload`.
HOMES: dict[str, Open] = {
    "nvme": open_disk,
}
