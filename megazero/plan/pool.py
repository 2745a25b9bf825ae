"""The buffers of the pools: whole parameters and gradients of sharded units, and shards in transfer.

A buffer is kept for the next unit of its size, whatever that is (`comm/pool.py`). So the pool of parameters and the
pool of gradients each hold, of every size, as many buffers as were ever in use at once. Which units are in use at once
depends on their kind (embedding, block, head, tied weight) and not on their size:

    parameters   the units of a part of the model's path and those of the part after it, which are on their way
    gradients    the unit that backward delivers to (two at the head: a tied weight waits for the norm); the unit
                 reduced before it, which is on its way; and a tied weight of which both uses are on this rank, from the
                 head's backward to the embedding's
    shards       with the update on the host: of a unit that is reduced, and of the one before it
    codes        of what is quantised on its way: of the units of a part that are gathered at once; of each reduction
                 under way those that are sent and those that come
    staged       where gradients are summed in another dtype than they accumulate in: a whole unit, or its shard, of
                 each sum that is under way
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from megazero.base.quantized import quantized_bytes
from megazero.plan.job import Job
from megazero.plan.states import UnitSize

StageUnits = Sequence[UnitSize]


def pool(job: Job, stages: Sequence[range]) -> int:
    """Return the bytes of the pools on a rank of the pipeline axis.

    Args:
        stages: of this rank, each as its parts of the model's path.
    """
    shard, item = job.shard, job.bytes
    paths = [_path(job, parts) for parts in stages]
    ties = [unit for path in paths for part in path for unit in part if unit.name == "tied"]
    whole, gradients = Counter[int](), Counter[int]()
    if job.shards_parameters and (shard > 1 or job.parameters_away):
        for there in ({*part, *after} for path in paths for part, after in pairwise([*path, ()])):
            whole |= Counter(unit.padded(shard) for unit in there)
    if job.shards_gradients and (shard > 1 or job.optimizer_away):
        shards = shard > 1 and job.optimizer_away
        for there, on_their_way in (moment for path in paths for moment in _reduced(job, path, ties)):
            of_shards = Counter(unit.padded(shard) // shard for unit in on_their_way if shards)
            gradients |= of_shards + Counter(unit.padded(shard) for unit in there)
    one_tie = job.pipeline > 1 and len(ties) == 1
    if job.shards_optimizer and not job.shards_gradients and job.gradients_home != "none" and one_tie:
        gradients[ties[0].padded(shard) // shard] = 1  # summed over the ends of the pipeline
    if job.gradients_home != "none" and job.replicas > 1:  # summed over the replicas one after the other
        gradients |= Counter({unit.padded(shard) // shard: 1 for path in paths for part in path for unit in part})
    staged = _staged(job, paths, ties) if item.summed != item.gradient else Counter[int]()
    codes = _elements(_codes_gathered(job, paths)) + _elements(_codes_reduced(job, paths, ties))
    return (
        codes
        + item.parameter * _elements(whole)
        + item.gradient * _elements(gradients)
        + item.summed * _elements(staged)
    )


def _staged(job: Job, paths: Sequence[Sequence[StageUnits]], ties: Sequence[UnitSize]) -> Counter[int]:
    """Return the buffers in which gradients are summed in another dtype, by their elements."""
    shard, found = job.shard, Counter[int]()
    parts = shard if job.shards_optimizer else 1
    if shard > 1:
        for _, on_their_way in (moment for path in paths for moment in _reduced(job, path, ties)):
            found |= Counter(unit.padded(shard) for unit in on_their_way)
    if job.replicas > 1:  # one after the other
        found |= Counter({unit.padded(shard) // parts: 1 for path in paths for part in path for unit in part})
    if job.pipeline > 1 and len(ties) == 1:
        found |= Counter({ties[0].padded(shard) // parts: 1})
    return found


def _codes_gathered(job: Job, paths: Sequence[Sequence[StageUnits]]) -> Counter[int]:
    """Return the buffers for codes of parameters, by their bytes."""
    found, shard = Counter[int](), job.shard
    if job.parameter_bits is not None and shard > 1:
        for part in (part for path in paths for part in path):
            found |= Counter(shard * quantized_bytes(unit.padded(shard) // shard, job.parameter_bits) for unit in part)
    return found


def _codes_reduced(job: Job, paths: Sequence[Sequence[StageUnits]], ties: Sequence[UnitSize]) -> Counter[int]:
    """Return the buffers for codes of gradients, by their bytes."""
    found, shard = Counter[int](), job.shard
    if job.gradient_bits is not None and shard > 1:
        for _, on_their_way in (moment for path in paths for moment in _reduced(job, path, ties)):
            eaches = [quantized_bytes(unit.padded(shard) // shard, job.gradient_bits) for unit in on_their_way]
            found |= Counter(2 * [shard * each for each in eaches])
            if job.gradient_hops is not None:  # the second hop of one at a time
                for each in eaches:
                    found |= Counter(2 * [job.gradient_hops[1] * each])
    return found


def _path(job: Job, parts: range) -> list[StageUnits]:
    """Return the units of each part; the first two of the blocks stand for any number of them."""
    ends = (0, job.shape.layers + 1)
    blocks = [i for i in parts if i not in ends]
    kept = [i for i in parts if i in ends or i in blocks[:2]]
    return [job.units([range(i, i + 1)]) for i in kept]


def _reduced(
    job: Job, path: Sequence[StageUnits], ties: Sequence[UnitSize]
) -> Iterator[tuple[set[UnitSize], set[UnitSize]]]:
    """Yield the sets of units whose gradients are in use at once, and those of them whose reduction has begun.

    Args:
        ties: the tied weight, once for each of its uses on this rank.
    """
    lasting = set(ties) if len(ties) == 2 else set()
    before: set[UnitSize] = set()
    for part in reversed(path):
        at_head = any(unit.name == "head" for unit in part)
        due = [unit for unit in reversed(part) if not (at_head and unit in lasting)]  # reduced in this order
        for i, unit in enumerate(due):
            # The head's product delivers to the tied weight before its norm is complete, which is reduced first; the
            # embedding's positions are complete before its lookup delivers anything.
            there = due[i:] if at_head else [unit]
            yield {*there, *before, *lasting}, {unit, *before}
            before = {unit}


def _elements(buffers: Counter[int]) -> int:
    return sum(numel * count for numel, count in buffers.items())
