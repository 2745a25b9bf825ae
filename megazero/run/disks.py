"""Open the disks to which state or kept inputs are offloaded (nvme), or report in one line why they cannot be used."""

import logging
from pathlib import Path

import torch

from megazero.base.errors import UserError
from megazero.base.files import writing
from megazero.base.machine import file_system_of, free_memory, return_freed_memory
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Grid
from megazero.comm.home import Homes, PagedHome
from megazero.comm.ledger import Ledger
from megazero.config.schema import Config
from megazero.launcher.environment import host_name

_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "afs", "9p", "wekafs")
_NETWORK += tuple(f"fuse.{name}" for name in ("sshfs", "glusterfs", "ceph", "juicefs", "s3fs", "gcsfuse"))
_IN_MEMORY = ("tmpfs", "ramfs")


def ranks_here(config: Config, grid: Grid, device: torch.device) -> int:
    """Return how many ranks share this rank's host; 1 if the config uses no disks. Every rank calls it."""
    if not config.uses_disks:
        return 1
    name = host_name().encode()
    return gather_bytes(name, grid["world"], "agree", device).count(name)


def open_disks(homes: Homes, config: Config, device: torch.device, ledger: Ledger, here: int = 1) -> PagedHome | None:
    """Return the disks of a rank, or None if nothing is offloaded to disks.

    Args:
        homes: the kinds of storage outside the device by name; "nvme" opens the disks.
        here: the number of ranks that share this host's memory.

    Raises:
        UserError: 104, this copy of megazero has no offload to nvme; 601, a folder cannot be written; 605, it is on
            another machine; 606, too little memory; 607, no queue of transfers can be built.
    """
    offload = config.zero.offload
    if not config.uses_disks:
        return None
    if (home := homes.get("nvme")) is None:
        raise UserError(104, "this copy of megazero has no offload to nvme", "use cpu or none")
    return_freed_memory()
    folders = [Path(each) for each in ([offload.path] if isinstance(offload.path, str) else offload.path or ())]
    for folder in folders:
        _require_local(folder)
    needed, there = offload.host_mb << 20, free_memory()
    if needed * here > there:
        what = f"expected zero.offload.host_mb={offload.host_mb} MiB of free memory for each of {here} ranks here"
        raise UserError(606, f"{what}, got {there >> 20:,} MiB", "lower zero.offload.host_mb")
    disks, way = home.open(folders, ledger, needed, device)
    where = ", ".join(map(str, folders))
    logging.getLogger("megazero").info(f"nvme: {where} {way}; {offload.host_mb} MiB of memory")
    return disks


def _require_local(folder: Path) -> None:
    """Refuse a folder that is on another machine; warn if it is in memory. Raises UserError 601, 605."""
    with writing(folder, 601, "give another zero.offload.path", "cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
    kind = file_system_of(folder)
    if kind.startswith(_NETWORK):
        raise UserError(605, f"expected a local disk, got {kind}", "give another zero.offload.path", where=folder)
    if kind in _IN_MEMORY:
        logging.getLogger("megazero").warning(f"{folder} is in memory ({kind}): offloading to it saves no memory")
