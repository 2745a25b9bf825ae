"""The systems that a job can be planned for: `plan --system NAME`, and published runs as their own system ran them.

A system differs from ours in overlap, in the rates that its kernels reach, and in the bytes that it sends and holds. In
`systems.yaml` each figure has its source next to it: a paper, a document of the system, or the published rows that it
was fitted to (`scripts/fit_planner.py`). Everything else is planned as for our system.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megazero.base.yaml_text import parse_yaml
from megazero.plan.job import Job
from megazero.plan.liveness import liveness
from megazero.plan.machines import MACHINES, Machine
from megazero.plan.memory import RankMemory, memory

TIME_ERROR = 0.20  # four of five published rows that no fit has used are this close (docs/published.md)
UNCERTAINTY = f"time: +-{100 * TIME_ERROR:.0f} % on published systems; this engine: measured on a single H100, +-8 %"

_SCORE_BYTES = 5  # softmax's and dropout's output and a mask: 5 a s^2 b, Korthikanti et al. 2022 (arXiv 2205.05198)


@dataclass(frozen=True)
class System:
    """The ways in which systems differ; the defaults are ours.

    Attributes:
        name: as `--system` takes it.
        stored_scores: attention keeps its scores in memory.
        replays_all: full recompute computes a block's last product again, and sums it over the tensor axis.
        overlaps: gradients are reduced, and parameters gathered, in parallel with the computation.
        sums: which sums over the tensor axis run in parallel with products: `none`; `backward`: those that can overlap
            weight gradients; `all`: under sequence parallelism those of forward too.
        splits_messages: each tensor rank sends its 1/t of a pipeline message, not all of it (arXiv 2104.04473, 4.1).
        scattered: share of a ring's rate that gathers and reductions of stage 3 reach; below 1 where each parameter
            is sent separately.
        reached: for each device, the shares of its data sheet that this system's kernels reach instead of ours.
        allocator: bytes that the allocator holds beyond tensors, divided by the bytes of the tensors.
    """

    name: str = "ours"
    stored_scores: bool = False
    replays_all: bool = False
    overlaps: bool = True
    sums: str = "backward"
    splits_messages: bool = False
    scattered: float = 1.0
    reached: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    allocator: float = 0.0

    def on(self, machine: Machine) -> Machine:
        """Return the machine with the shares in `reached`; unchanged if its own come from a user's file."""
        known, shares = MACHINES.get(machine.name), self.reached.get(machine.name)
        if not shares or known is None or known.reached.fitted != machine.reached.fitted:
            return machine
        return replace(machine, reached=replace(machine.reached, **shares))

    def memory(self, job: Job, rank: int) -> RankMemory:
        """Return the memory of a rank of the pipeline axis, including what this system holds beyond ours."""
        found = memory(job, rank)
        held = dict(found.held)
        if self.stored_scores:
            held["scores"] = _scores(job, rank)
        if self.allocator:
            held["allocator"] = int(self.allocator * RankMemory(held, found.cause).peak)
        return RankMemory(held, found.cause)

    def sent(self, job: Job, found: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Return the bytes that a rank sends in a step, given those that a rank of our system sends."""
        result = {axis: dict(purposes) for axis, purposes in found.items()}
        forward, times = result.get("tensor", {}).get("block forward", 0), 4 if job.sequence else 2
        if self.replays_all and job.recompute == "full" and forward:  # one more sum: 12 b s h in a block, not 10
            result["tensor"]["block forward"] = forward * (2 * times) // (times + (3 if job.sequence else 1))
        if self.splits_messages and not job.sequence and job.tensor > 1:
            for what in result.get("pipeline", {}).keys() & {"activations", "gradients"}:  # scalars are not split
                result["pipeline"][what] //= job.tensor
        return {axis: purposes for axis, purposes in result.items() if purposes}


SYSTEMS = {one["name"]: System(**one) for one in parse_yaml(Path(__file__).with_name("systems.yaml").read_text())}
OURS = SYSTEMS["ours"]


def _scores(job: Job, rank: int) -> int:
    """Return the bytes of stored scores: of one block with recompute, else of all blocks that are kept."""
    shape = job.shape
    each = _SCORE_BYTES * job.micro_batch * shape.heads * shape.seq_len**2 // job.tensor
    if job.recompute != "none":
        return each
    _, most = liveness(job, rank)
    return each * sum(most[stage] * job.blocks(parts) for stage, parts in job.layers.of_rank(rank).items())
