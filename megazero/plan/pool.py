"""The buffers of the pools: whole parameters and gradients of sharded units, and shards in transfer.

A free buffer is kept for the next unit of the same size (`comm/pool.py`). So the pool of parameters and the pool of
gradients each hold, for every size, as many buffers as were ever in use at once. Which units are in use at once depends
on their kind (embedding, block, head, tied weight) and not on their size:

    parameters   the units of one part of the model's path, and those of the next part, which are being gathered
    gradients    the unit whose gradients backward computes (two at the head: a tied weight waits for the norm); the
                 unit before it, which is being reduced; and a tied weight with both uses on this rank, from the head's
                 backward to the embedding's
    shards       with the update on the host: for a unit that is being reduced, and for the one before it
    codes        of quantised transfers: for the units of a part that are gathered at once; for each reduction under
                 way, codes that are sent and codes that are received
    staged       where gradients are summed in another dtype than they accumulate in: a whole unit, or its shard, for
                 each sum under way
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from megazero.base.quantized import quantized_bytes
from megazero.plan.job import Job
from megazero.plan.states import UnitSize, units_of

StageUnits = Sequence[UnitSize]


def pool(job: Job, stages: Sequence[range]) -> int:
    """Return the bytes of the pools on a rank of the pipeline axis.

    Args:
        stages: stages of this rank, each as its parts of the model's path.
    """
    shard, item = job.shard, job.bytes
    paths = [_path(job, parts) for parts in stages]
    parts = [part for path in paths for part in path]
    ties = [unit for part in parts for unit in part if unit.name == "tied"]
    reduced = [moment for path in paths for moment in _reduced(path, ties)]
    whole, gradients, staged = (list[list[int]]() for _ in range(3))
    if job.shards_parameters and (shard > 1 or job.parameters_away):
        pairs = (pair for path in paths for pair in pairwise([*path, ()]))
        whole = [[unit.padded(shard) for unit in {*part, *after}] for part, after in pairs]
    if job.shards_gradients and (shard > 1 or job.optimizer_away):
        shards = shard > 1 and job.optimizer_away
        gradients = [
            [unit.padded(shard) for unit in there] + [unit.padded(shard) // shard for unit in going if shards]
            for there, going in reduced
        ]
    one_tie = ties if job.pipeline > 1 and len(ties) == 1 else ()  # summed over the ends of the pipeline
    by_itself = [unit for part in parts for unit in part] if job.replicas > 1 else []  # summed over replicas in turn
    if job.gradients_home != "none":
        own = [*by_itself, *(one_tie if job.shards_optimizer and not job.shards_gradients else ())]
        gradients += [[unit.padded(shard) // shard] for unit in own]
    if item.summed != item.gradient:
        staged = [[unit.padded(shard) for unit in going] for _, going in reduced] if shard > 1 else []
        kept = shard if job.shards_optimizer else 1
        staged += [[unit.padded(shard) // kept] for unit in (*by_itself, *one_tie)]
    return (
        _most(_codes_gathered(job, parts))
        + _most(_codes_reduced(job, [going for _, going in reduced]))
        + item.parameter * _most(whole)
        + item.gradient * _most(gradients)
        + item.summed * _most(staged)
    )


def _codes_gathered(job: Job, parts: Sequence[StageUnits]) -> Iterator[list[int]]:
    """Yield the sizes in bytes of the buffers for codes of parameters that are in use at once."""
    shard, bits = job.shard, job.parameter_bits
    if bits is not None and shard > 1:
        yield from ([shard * quantized_bytes(unit.padded(shard) // shard, bits) for unit in part] for part in parts)


def _codes_reduced(job: Job, reduced: Sequence[set[UnitSize]]) -> Iterator[list[int]]:
    """Yield the sizes in bytes of the buffers for codes of gradients that are in use at once."""
    shard, bits = job.shard, job.gradient_bits
    if bits is None or shard == 1:
        return
    for going in reduced:
        eaches = [quantized_bytes(unit.padded(shard) // shard, bits) for unit in going]
        yield 2 * [shard * each for each in eaches]
        if job.gradient_hops is not None:  # the second hop runs for one unit at a time
            yield from (2 * [job.gradient_hops[1] * each] for each in eaches)


def _most(moments: Iterable[Sequence[int]]) -> int:
    """Return the total size of a pool's buffers: for each size as many buffers as are ever in use at once."""
    buffers: Counter[int] = Counter()
    for sizes in moments:
        buffers |= Counter(sizes)
    return sum(numel * count for numel, count in buffers.items())


def _path(job: Job, parts: range) -> list[StageUnits]:
    """Return the units of each part of a stage; so many first blocks stand for all that each pair of kinds occurs."""
    ends = (0, job.shape.layers + 1)
    blocks = [i for i in parts if i not in ends]
    kept = [i for i in parts if i in ends or i in blocks[: len(job.shape.kinds) + 1]]
    return [units_of(job, [range(i, i + 1)]) for i in kept]


def _reduced(path: Sequence[StageUnits], ties: Sequence[UnitSize]) -> Iterator[tuple[set[UnitSize], set[UnitSize]]]:
    """Yield each set of units whose gradients are in use at once, with the subset whose reduction has begun.

    Args:
        ties: the tied weight, once for each of its uses on this rank.
    """
    lasting = set(ties) if len(ties) == 2 else set()
    before: set[UnitSize] = set()
    for part in reversed(path):
        at_head = any(unit.name == "head" for unit in part)
        due = [unit for unit in reversed(part) if not (at_head and unit in lasting)]  # reduced in this order
        for i, unit in enumerate(due):
            # In the head, the product adds to the tied weight's gradient before the norm's gradient is complete, and
            # the norm is reduced first. In the embedding, the positions are complete before the lookup adds anything.
            yield {*(due[i:] if at_head else [unit]), *before, *lasting}, {unit, *before}
            before = {unit}
