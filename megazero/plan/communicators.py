"""NCCL's communicators of a rank, and the memory of the device that they take: an estimate, not measured.

Between two GPUs NCCL keeps, for each of its channels, a buffer for each of its three protocols where messages arrive:
4 MiB (NCCL_BUFFSIZE) for Simple, 4.69 MiB for LL128, 0.5 MiB for LL, and little where they leave; each allocation is
rounded up to the driver's 2 MiB. A collective connects a ring, from one neighbour to the other, and a tree, in whose
middle a rank has two more neighbours, both ways; NCCL takes both, by size and kind. A pipeline's channel is connected
in one direction only. Not counted: NVLink SHARP's buffers, and what the network between nodes has instead of these.

On 4 A100 a group of 2 ranks was seen to take 544 MB and one of more 688 (NVIDIA/nccl#964), where this says 604 and 906.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megazero.comm.axes import FEW_CTAS
from megazero.plan.job import Job

# Of one channel: 4 MiB + 4.69 MiB + 0.5 MiB, rounded up, and a flag, rounded up (seen in NVIDIA/nccl#1685).
ARRIVAL, DEPARTURE = 10 * 2**20, 2 * 2**20


@dataclass(frozen=True)
class Communicator:
    """A communicator of one rank.

    Attributes:
        name: of its axis, or of what goes through it: "activations to stage 1".
        ranks: their number.
        bytes: on the device.
    """

    name: str
    ranks: int
    bytes: int


def communicators(job: Job, rank: int, channels: int) -> Iterator[Communicator]:
    """Yield the communicators of a rank of the pipeline axis, in the order in which they are made.

    Args:
        channels: that NCCL makes for a collective on this machine; 0: it is not used.
    """
    if not channels:
        return
    if job.ranks > 1:
        yield _collective("world", job.ranks, min(channels, FEW_CTAS))
    if job.pipeline > 1:
        yield _collective("pipeline", job.pipeline, min(channels, FEW_CTAS))
    hybrid = job.replicas > 1
    sizes = {"data": job.data, "replica": job.replicas, "shard": job.shard * hybrid, "tensor": job.tensor}
    yield from (_collective(name, size, channels) for name, size in sizes.items() if size > 1)
    if job.ties_ranks and rank in (0, job.pipeline - 1):
        yield _collective("ends", 2, channels)
    rank_of = job.layers.rank_of
    for stage, (low, high) in enumerate(pairwise(rank_of), start=1):
        if low != high and rank in (low, high):
            each = min(channels, FEW_CTAS)
            yield Communicator(f"activations to stage {stage}", 2, each * (ARRIVAL if rank == high else DEPARTURE))
            yield Communicator(f"gradients to stage {stage - 1}", 2, each * (ARRIVAL if rank == low else DEPARTURE))


def _collective(name: str, ranks: int, channels: int) -> Communicator:
    links = 1 + min(ranks - 1, 2)  # the ring's, and the tree's
    return Communicator(name, ranks, channels * links * (ARRIVAL + DEPARTURE))
