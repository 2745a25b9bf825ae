"""Matrices that one rank updates whole: the buffers, the messages and the work of their optimizers.

matrices (memory)     each in bytes of the dtype in which it is computed: the buffers of two waves (one if there is
                      only one), the largest parameter that the rank owns, and of its largest matrix, m <= n,
                      2 m n + 2 m^2 for the iteration
matrices (traffic)    in each wave a rank sends its parts of the parameters that others own, and their results to
                      the holders of those it owns; first along the shard axis, then the tensor axis. In stage 0
                      all ranks hold all gradients, and the results are gathered

Results are cached: give these functions `Job.at_rest`, which many jobs of a search have in common.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product

from megazero.plan.job import Job
from megazero.plan.matrices import Item, Wave, room, waves_of, workspace
from megazero.plan.optimizers import WHOLE
from megazero.plan.states import units_of


@cache
def waves(job: Job, rank: int) -> tuple[Wave, ...]:
    """Return the waves of a rank of the pipeline axis, in the order in which its units are updated."""
    items = []
    for number, unit in enumerate(units_of(job, [*job.layers.of_rank(rank).values()])):
        each = unit.padded(job.shard) // job.shard if job.shards_optimizer else None
        placed = unit.placed(job.optimizers)
        items.append(
            [
                Item(number, start, stop, each, weight.matrix)
                for weight, optimizer, start, stop in placed
                if optimizer in WHOLE and weight.matrix is not None
            ]
        )
    return tuple(waves_of(items, job.shard, job.tensor, sharded=job.shards_optimizer))


@cache
def memory(job: Job, rank: int, shard: int, tensor: int) -> int:
    """Return the bytes of a rank's buffers for whole matrices."""
    found = waves(job, rank) if job.optimizers.whole else ()
    if not found:
        return 0
    buffers, longest, shapes = room(found, shard, tensor)
    wide, square = workspace(shapes)
    return job.bytes.whole * (sum(map(sum, buffers)) + longest + 2 * wide + 2 * square)


@cache
def messages(job: Job, rank: int, shard: int | None, tensor: int | None) -> list[tuple[str, int, int]]:
    """Return (axis, operations, bytes) of what a rank sends in a step.

    Where a number of the rank is None, it is that of a rank that sends most.
    """
    shards = range(job.shard) if shard is None else (shard,)
    tensors = range(job.tensor) if tensor is None else (tensor,)
    ranks = ([*_sent(job, rank, *place)] for place in product(shards, tensors))
    return max(ranks, key=lambda sent: sum(size for _, _, size in sent))


def _sent(job: Job, rank: int, shard: int, tensor: int) -> Iterator[tuple[str, int, int]]:
    for wave in waves(job, rank):
        if wave.sharded:
            yield job.shard_axis, 2, job.bytes.whole * wave.over_shards.sent(shard)
        elif job.shard > 1:
            yield job.shard_axis, 1, job.bytes.whole * (job.shard - 1) * wave.longest
        if job.tensor > 1 and wave.of_shard(shard):
            yield "tensor", 2, job.bytes.whole * wave.over_tensor(shard).sent(tensor)


@cache
def operations(job: Job, rank: int) -> float:
    """Return the floating-point operations of the rank that computes most, wave by wave."""
    found = 0.0
    for wave in waves(job, rank) if job.optimizers.whole else ():
        work = Counter[int]()
        for item, owner in zip(wave.items, wave.owners, strict=True):
            work[owner] += sum(4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3 for shape in item.matrix.shapes)
        found += job.muon_steps * max(work.values())
    return found
