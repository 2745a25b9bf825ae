"""Compare a run's memory with its plan: plan.json before the first step, a line after the second.

The run gets its plan from its caller (`tools/training/plans.py` computes it).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megazero.base.answers import say, warn
from megazero.base.files import replace_file
from megazero.base.terminal import megabytes
from megazero.comm.grid import Grid
from megazero.comm.ledger import Ledger
from megazero.config.schema import Config
from megazero.kernels import reference
from megazero.kernels.operations import Operations

# Smaller differences are working memory that a plan leaves out: pieces of the gradient norm, token losses.
_NOTABLE_BYTES = 32 * 2**20
_NOTABLE_SHARE = 0.10
NOT_PLANNED = ("staging", "checkpoint", "host_staging")  # of fixed size, or not held in a step


@dataclass(frozen=True)
class Planned:
    """The plan of a part of a run for one rank of the pipeline.

    Attributes:
        text: the content of plan.json: memory and traffic of every rank of the pipeline.
        held: planned bytes on the device, by the categories of the ledger.
        savings: returns the bytes that each unused option would save, by its name.
    """

    text: str
    held: dict[str, int]
    savings: Callable[[], dict[str, int]]

    def write(self, path: Path) -> None:
        """Write plan.json; warn if it cannot be written."""
        try:
            replace_file(path, self.text.encode())
        except OSError as error:
            warn(f"plan not written: {error}")


# (config of a part, rank of the pipeline, whether kernels are fused, see `fuses`) -> plan
Planner = Callable[[Config, int, bool], Planned]


def fuses(ops: Operations) -> bool:
    """Return whether the kernels of norms and activations make no additional copies."""
    return ops.swiglu is not reference.swiglu


def compare(planned: Planned, grid: Grid, activations: int) -> None:
    """Report this rank's memory next to its plan; warn if the two differ much.

    Args:
        activations: the most bytes that a step has allocated.
    """
    expected, held = planned.held, measured(grid.comm.ledger, activations)
    there, peak = sum(held.values()), sum(expected.values())
    line = f"memory of rank {grid['world'].rank}: {megabytes(there)} MB, planned {megabytes(peak)} MB"
    logging.getLogger("megazero").info(line)
    if abs(there - peak) > max(_NOTABLE_BYTES, _NOTABLE_SHARE * peak):
        worst = max(held.keys() | expected.keys(), key=lambda name: abs(held.get(name, 0) - expected.get(name, 0)))
        both = f"{megabytes(held.get(worst, 0))} instead of {megabytes(expected.get(worst, 0))}"
        warn(f"{line}; the largest difference is {worst}, {both}")
    elif grid["world"].rank == 0:
        say(line)


def measured(ledger: Ledger, activations: int) -> dict[str, int]:
    """Return the bytes on the device, by the categories of a plan."""
    held = {name: size.now for name, size in ledger.bytes.items() if not name.startswith(("host_", "nvme_"))}
    return {name: size for name, size in held.items() if name not in NOT_PLANNED} | {"activations": activations}
