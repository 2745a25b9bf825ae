"""Say how much of what ranks send to each other crosses nodes, by where the ranks of an axis lie."""

from megazero.plan.job import Job

AWAY = ("host", "disk")  # the ways to what is offloaded, told like axes


def split_by_node(job: Job, found: dict[str, dict[str, int]], devices: int) -> dict[str, dict[str, int]]:
    """Return the `in_node` and `cross_node` bytes of each axis.

    A ring with k ranks in each node crosses nodes on every k-th of its links, so 1 / k of what the ranks send crosses.
    Of quantised gradients each rank sends each other its part (all-to-all): what is for ranks of other nodes crosses.
    The ranks of an axis are `stride` apart, tensor fastest.

    Args:
        devices: their number in a node.
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
    """Return whether each rank of an axis sends each other a part of its own: an all-to-all, no ring."""
    if job.gradient_bits is None or purpose != "gradients":
        return False
    return axis in (("shard", "replica") if job.gradient_hops is not None else (job.shard_axis,))


def axis_size(job: Job, axis: str) -> int:
    neighbours = job.neighbours or job.data
    sizes = {"tensor": job.tensor, "shard": neighbours, "replica": job.data // neighbours, "data": job.data}
    return {**sizes, "pipeline": job.pipeline, "ends": 2, "world": job.ranks}[axis]


def ranks_in_node(job: Job, axis: str, devices: int) -> int:
    """Return how many ranks of one axis lie in one node of so many devices.

    Where groups straddle nodes, about half of the worst group.
    """
    if job.ranks <= devices:
        return axis_size(job, axis)
    across = job.tensor * job.data
    strides = {
        "tensor": 1,
        "shard": job.tensor,
        "data": job.tensor,
        "replica": job.tensor * (job.secondary_ranks or job.shard),
    }
    stride = {**strides, "pipeline": across, "ends": across * (job.pipeline - 1), "world": 1}[axis]
    size, together = axis_size(job, axis), max(1, devices // stride)
    if together >= size and devices % (size * stride):
        return max(1, size // 2)
    return min(size, together)
