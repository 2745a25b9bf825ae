"""Estimate the device memory of a rank's NCCL communicators (not measured).

For each channel between two GPUs, NCCL keeps a receive buffer for each of its three protocols: 4 MiB (NCCL_BUFFSIZE)
for Simple, 4.69 MiB for LL128, 0.5 MiB for LL. The send side takes little. Each allocation is rounded up to the
driver's 2 MiB. A collective connects a ring, from one neighbour to the other, and a tree, whose inner ranks have two
more neighbours, in both directions; NCCL uses both, depending on size and kind. A pipeline's channel is connected in
one direction only. Not counted: the buffers of NVLink SHARP, and those of the network between nodes.

On 4 A100s NVIDIA/nccl#964 reports 544 MB for a group of 2 ranks and 688 MB for a larger one; this estimate gives 604
and 906.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megazero.comm.axes import FEW_CTAS
from megazero.plan.job import Job

# Bytes of one channel: 4 MiB + 4.69 MiB + 0.5 MiB, rounded up, to receive; a flag, rounded up, to send (nccl#1685).
ARRIVAL, DEPARTURE = 10 * 2**20, 2 * 2**20


@dataclass(frozen=True)
class Communicator:
    """A communicator of one rank.

    Attributes:
        name: name of its axis, or of its messages: "activations to stage 1".
        ranks: number of its ranks.
        bytes: device memory.
    """

    name: str
    ranks: int
    bytes: int


def communicators(job: Job, rank: int, channels: int) -> Iterator[Communicator]:
    """Yield the communicators of a rank of the pipeline axis, in the order in which they are made.

    Args:
        channels: number that NCCL creates for a collective on this machine; 0: NCCL is not used.
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
