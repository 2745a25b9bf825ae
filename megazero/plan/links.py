"""The links between ranks: how many bytes cross nodes, and the seconds that operations take.

A ring of N ranks, k of them in each node, is as fast as its slowest link. That is the node's own link where k = N.
Elsewhere it may be the network; a ring gets k devices' parts of it, because the N' devices of a node form N' / k
rings that share it. Each step of a ring adds a latency. In an all-to-all (quantised gradients; all traffic on CPUs)
(k - 1) / (N - 1) of the bytes stay in the node; in parallel the others leave it through each device's own part.
"""

from megazero.plan.job import Job
from megazero.plan.machines import Machine

AWAY = ("host", "disk")  # the ledger's names for copies to the host and to disks, which are not axes


def split_by_node(job: Job, found: dict[str, dict[str, int]], devices: int) -> dict[str, dict[str, int]]:
    """Return {axis: {"in_node": bytes, "cross_node": bytes}}, without copies to and from host and disks.

    A ring with k ranks in each node crosses nodes on every k-th of its links, so 1 / k of the bytes sent crosses.
    Quantised gradients are exchanged in an all-to-all: the parts for ranks of other nodes cross.

    Args:
        found: the bytes that a rank sends, by axis and purpose.
        devices: number of devices in a node.
    """
    result: dict[str, dict[str, int]] = {}
    for axis, purposes in found.items():
        if axis in AWAY:
            continue
        together, ranks = ranks_in_node(job, axis, devices), axis_size(job, axis)
        size, cross = sum(purposes.values()), 0
        for purpose, part in purposes.items() if together < ranks else ():
            each = exchanged(job, axis, purpose)
            cross += part * (ranks - together) // (ranks - 1) if each else part // together
        result[axis] = {"in_node": size - cross, "cross_node": cross}
    return result


def exchanged(job: Job, axis: str, purpose: str) -> bool:
    """Return whether traffic of this axis and purpose is an all-to-all instead of a ring."""
    if job.gradient_bits is None or purpose != "gradients":
        return purpose == "matrices" and (job.shards_optimizer or axis == "tensor")
    return axis in (("shard", "replica") if job.gradient_hops is not None else (job.shard_axis,))


def axis_size(job: Job, axis: str) -> int:
    """Return the number of ranks of an axis, which is named as in the ledger."""
    neighbours = job.neighbours or job.data
    sizes = {"tensor": job.tensor, "shard": neighbours, "replica": job.data // neighbours, "data": job.data}
    return {**sizes, "pipeline": job.pipeline, "ends": 2, "world": job.ranks}[axis]


def ranks_in_node(job: Job, axis: str, devices: int) -> int:
    """Return how many ranks of one group of an axis share a node of `devices` devices.

    Ranks of an axis are `stride` apart, tensor fastest. Where groups straddle nodes, return about half of the group
    with the worst split.
    """
    if job.ranks <= devices:
        return axis_size(job, axis)
    across = job.tensor * job.data
    strides = {"tensor": 1, "shard": job.tensor, "data": job.tensor, "pipeline": across, "world": 1}
    strides |= {"replica": job.tensor * (job.secondary_ranks or job.shard), "ends": across * (job.pipeline - 1)}
    stride = strides[axis]
    size, together = axis_size(job, axis), max(1, devices // stride)
    if together >= size and devices % (size * stride):
        return max(1, size // 2)
    return min(size, together)


class Links:
    """The seconds that operations between ranks take."""

    def __init__(self, job: Job, machine: Machine):
        self.job, self.machine = job, machine

    def bandwidth(self, axis: str) -> float:
        """Return the bytes a second that a ring moves through each rank."""
        reached, together = self.machine.reached, self._together(axis)
        node = self.machine.in_node.bandwidth * reached.in_node
        if together == axis_size(self.job, axis):
            return node
        return min(node, self.machine.cross_node.bandwidth * reached.cross_node * together)

    def seconds(self, axis: str, size: float, ops: float) -> float:
        """Return the seconds of `ops` collectives (rings, or all-to-alls without NCCL); a rank sends `size` bytes."""
        if not size:
            return 0.0
        if not self.machine.nccl_channels:  # our own transport: each rank sends to each other rank
            return self.exchange(axis, size, ops)
        return size / self.bandwidth(axis) + ops * (axis_size(self.job, axis) - 1) * self._latency(axis)

    def exchange(self, axis: str, size: float, ops: float) -> float:
        """Return the seconds of `ops` all-to-alls in which a rank sends `size` bytes in total."""
        if not size:
            return 0.0
        reached, others, together = self.machine.reached, axis_size(self.job, axis) - 1, self._together(axis)
        inside = (together - 1) / others / (self.machine.in_node.bandwidth * reached.in_node)
        outside = (others + 1 - together) / others / (self.machine.cross_node.bandwidth * reached.cross_node)
        return size * max(inside, outside) + ops * others * self._latency(axis)

    def message(self, size: float) -> float:
        """Return the seconds of a message to the next rank of the pipeline."""
        return size / self.bandwidth("pipeline") + self._latency("pipeline")

    def _together(self, axis: str) -> int:
        return ranks_in_node(self.job, axis, self.machine.devices_per_node)

    def _latency(self, axis: str) -> float:
        """Return the mean latency of a ring's steps, in seconds."""
        together = self._together(axis)
        if together == axis_size(self.job, axis):
            return self.machine.in_node.latency
        return self.machine.in_node.latency * (1 - 1 / together) + self.machine.cross_node.latency / together
