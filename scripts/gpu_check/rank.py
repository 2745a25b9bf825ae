"""The ranks of one job of the check: python -m scripts.gpu_check.rank FOLDER.

FOLDER/job.json gives the number of ranks, their device, whether they share it, and the layouts, which they train one
after the other. Ranks that share a GPU communicate as under `train.py --share-gpus`, others through NCCL. On a CPU
ranks communicate through shared memory or, if the job says that they share the device, as they would on a shared GPU.

This process imports all modules, does not use a GPU, and forks the ranks. If something fails, the last line of the
output says what.
"""

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from megazero.base.errors import UserError
from megazero.builders.assemble import grid_of
from megazero.comm.transport.host_staging import staging_pool
from megazero.launcher.environment import RankContext
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.spawn import run_local
from megazero.tools.certify.rank import write_results
from scripts.gpu_check.layouts import Case, config_of, exact, train

TIMEOUT = timedelta(seconds=60)  # steps are short, but the first one on a GPU loads its kernels


def main() -> int:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    shares = job["shares_gpus"]
    return run_local(job["size"], lambda place: be(place, job, folder), lambda *_: None, shares_gpus=shares)


def be(place: RankContext, job: dict[str, Any], folder: Path) -> None:
    """Run one rank of a job."""
    world = place.world
    if world.device.type != job["device"]:
        raise UserError(340, f"asked for {job['device']}, torch has {world.device.type}", "see --device")
    comm = connect(place, timeout=TIMEOUT, fingerprint="check")
    if job["shares_gpus"] and comm.host_staging is None:
        comm = replace(comm, host_staging=staging_pool(world.device, comm.ledger))
    exact(world.device)
    for case in [Case(**layout) for layout in job["layouts"]]:
        out = folder / case.folder
        out.mkdir(exist_ok=True)
        write_results(train(case, grid_of(config_of(case), comm, world), world.device), out, world.rank)
    if comm.host_staging is not None and world.rank == 0:
        held = comm.ledger.bytes["host_bounce"].peak
        sent = f"each sent {comm.ledger.bytes_sent:,} bytes through {held:,} of the host"
        print(f"{world.size} ranks on {world.device}: {sent}", flush=True)
    disconnect()


if __name__ == "__main__":
    sys.exit(main())
