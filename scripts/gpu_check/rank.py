"""One rank of the check, a process of its own: python -m scripts.gpu_check.rank FOLDER RANK.

FOLDER/job.json says how many ranks there are, on which device, and which layouts they train one after the other. On a
GPU they share it as `train.py --share-gpus` lets them; on a CPU its memory is declared apart from the host's.
"""

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from megazero.base.errors import UserError
from megazero.comm.grid import make_grid, single
from megazero.comm.status_board import StatusBoard
from megazero.comm.transport.host_staging import staging_pool
from megazero.launch.environment import RankContext, World
from megazero.launch.rendezvous import connect, disconnect
from megazero.tools.certify.rank import write_results
from scripts.gpu_check.layouts import Case, train

TIMEOUT = timedelta(seconds=60)  # a step takes a moment, but the first one on a GPU loads its kernels


def main() -> int:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((folder / "job.json").read_text())
    size, layouts = job["size"], [Case(**layout) for layout in job["layouts"]]
    exact(job["device"])
    world = World(rank, size, rank, "local", shares_gpus=True)
    if world.device.type != job["device"]:
        raise UserError(340, f"asked for {job['device']}, torch has {world.device.type}", "see --device")
    comm = connect(
        RankContext(world, StatusBoard.private().status_slot(0), folder / "store"), timeout=TIMEOUT, fingerprint="check"
    )
    if comm.host_staging is None and size > 1:
        comm = replace(comm, host_staging=staging_pool(world.device, comm.ledger))
    for layout in layouts:
        grid = single(comm)
        if size > 1:
            grid = make_grid(tensor=layout.job.tensor, pipeline=layout.job.pipeline, comm=comm, device_type="cpu")
        out = folder / layout.folder
        out.mkdir(exist_ok=True)
        write_results(train(layout, grid, world.device), out, rank)
    if comm.host_staging is not None:
        held = comm.ledger.bytes["host_bounce"].peak
        print(
            f"{size} ranks on {world.device}: each sent {comm.ledger.bytes_sent:,} bytes through {held:,} of the host"
        )
    disconnect()
    return 0


def exact(device: str) -> None:
    """Set torch to give the same bits every time, and fp32 products in fp32.

    No TF32, no sums in 16 bits, no atomics.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True, warn_only=True)


if __name__ == "__main__":
    sys.exit(main())
