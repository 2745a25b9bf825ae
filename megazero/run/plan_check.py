"""Compare what a run holds with its plan: plan.json before its first step, a line after its second."""

import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from megazero.base.files import replace_file
from megazero.base.heartbeat import HEART
from megazero.base.terminal import megabytes
from megazero.builders.job import job_of
from megazero.comm.grid import Grid
from megazero.comm.ledger import Ledger
from megazero.config.schema import Config
from megazero.kernels import reference
from megazero.kernels.operations import Operations
from megazero.observe.sinks import warn
from megazero.plan.job import Job
from megazero.plan.memory import DISK, HOST, RankMemory, memory
from megazero.plan.traffic import traffic

# Less is working memory that a plan leaves out: pieces of the gradient norm, numbers for each token of the loss.
_NOTABLE_BYTES = 32 * 2**20
_NOTABLE_SHARE = 0.10
NOT_PLANNED = ("staging", "checkpoint", "host_staging")  # of fixed size, or not there in a step


class Expectation:
    """The planned memory and traffic of one rank.

    Args:
        device: where it computes.
        ops: the kernels in use.
    """

    def __init__(self, config: Config, grid: Grid, device: torch.device, ops: Operations):
        self._job = job_of(config, grid["world"].size, apart=device.type != "cpu")
        self._grid, self._ledger, self._ops = grid, grid.comm.ledger, ops

    def write(self, path: Path) -> None:
        """Write plan.json: memory and traffic of each rank of a pipeline; warn where it cannot be written."""
        ranks = [
            {"memory": asdict(self._of(rank)), "traffic": traffic(self._job, rank)}
            for rank in range(self._job.pipeline)
        ]
        try:
            replace_file(path, json.dumps({"pipeline_ranks": ranks}, indent=1).encode() + b"\n")
        except OSError as error:
            warn(f"no plan: {error}")

    def compare(self, activations: int) -> None:
        """Report what this rank holds beside the plan; warn when that is far off.

        Args:
            activations: the most that a step has allocated.
        """
        planned, held = self._of(self._grid["pipeline"].rank), measured(self._ledger, activations)
        there = sum(held.values())
        line = f"memory of rank {self._grid['world'].rank}: {megabytes(there)} MB, planned {megabytes(planned.peak)} MB"
        logging.getLogger("megazero").info(line)
        far = abs(there - planned.peak) > max(_NOTABLE_BYTES, _NOTABLE_SHARE * planned.peak)
        if far:
            names = held.keys() | planned.held.keys()
            worst = max(names, key=lambda name: abs(held.get(name, 0) - planned.held.get(name, 0)))
            both = f"{megabytes(held.get(worst, 0))} for {megabytes(planned.held.get(worst, 0))}"
            warn(f"{line}; most of it {worst}, {both}")
        elif self._grid["world"].rank == 0:
            with HEART.paused(), suppress(OSError, ValueError):  # a reader that is gone
                print(line, flush=True)

    def _of(self, rank: int) -> RankMemory:
        return expected(self._job, rank, self._ops)


def expected(job: Job, rank: int, ops: Operations) -> RankMemory:
    """Return what a pipeline rank holds with these kernels."""
    return memory(job, rank, fused=ops.swiglu is not reference.swiglu)


def measured(ledger: Ledger, activations: int) -> dict[str, int]:
    """Return the bytes of the device by the plan's categories."""
    held = {name: size.now for name, size in ledger.bytes.items() if not name.startswith((HOST, DISK))}
    return {name: size for name, size in held.items() if name not in NOT_PLANNED} | {"activations": activations}
