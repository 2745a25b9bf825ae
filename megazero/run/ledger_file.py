"""Write ledger.json: the traffic, the memory and the seconds of every rank."""

import json

import torch

from megazero.base.files import replace_file
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Grid
from megazero.observe.metrics import reserved_peak_bytes
from megazero.observe.sinks import warn
from megazero.run.folder import RunFolder


def write_ledger(folder: RunFolder, grid: Grid, device: torch.device) -> None:
    """Write the ledgers of all ranks into the run's folder. Every rank calls it; a full disk only causes a warning."""
    ledger = grid.comm.ledger
    mine = {
        "rank": grid["world"].rank,
        "bytes": ledger.bytes_as_dict(),
        "traffic": ledger.traffic_as_dict(),
        "seconds": ledger.seconds,
        "reserved_peak_bytes": reserved_peak_bytes(device),
    }
    rows = gather_bytes(json.dumps(mine).encode(), grid["world"], "agree", device)
    if grid["world"].rank == 0:
        try:
            replace_file(folder.ledger, json.dumps([json.loads(row) for row in rows], indent=1).encode() + b"\n")
        except OSError as error:
            if folder.path.is_dir():  # else the next save reports more
                warn(f"ledger not written: {error.strerror}")
