"""Choose the micro-batch of a config whose batch.micro is null. Does not import torch."""

from bisect import bisect_right
from dataclasses import replace
from math import gcd, isqrt

from megazero.builders.job import job_of
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.plan.machines import MACHINES, Disk, Machine
from megazero.plan.search import everywhere, fits

TOKENS = 2048  # in a micro-batch where a device's memory is not known: more make a CPU no faster
SPARE = 0.05  # of a device's memory, because plan's formulas are within 3 % of what a rank holds
FILLING = 8  # micro-batches for each pipeline rank, which leave a bubble below 12 %


def with_micro(config: Config, ranks: int, machine: Machine | None = None) -> Config:
    """Return a resolved config with a number for batch.micro.

    Of the sizes that divide the batch of a data rank, in every stage that gives no size itself, the largest one that
    fits: on the machine by plan's formulas, without one TOKENS. A pipeline keeps FILLING micro-batches for each of its
    ranks, if its batch has so many.

    Args:
        machine: whose memory is known; None: the ranks compute on a CPU, or it is not known where.
    """
    if config.batch.micro is not None:
        return config
    pipeline, course = config.parallel.pipeline, Course(config)
    data = max(1, ranks // (config.parallel.tensor * pipeline))
    parts = [part.config for part in (*course.parts, *course.after) if part.config.batch.micro is None]
    whole = gcd(*(part.batch.global_ for part in parts))
    each = whole // data if whole % data == 0 else 1  # not divisible: another size would not help, and MZ-106 says so
    least = min(each, FILLING * pipeline) if pipeline > 1 else 1
    pairs = ((size, each // size) for size in range(1, isqrt(each) + 1) if each % size == 0)
    sizes = sorted({size for pair in pairs for size in pair if each // size >= least})

    def too_large(size: int) -> bool:
        if machine is None:
            return size * max(part.model.seq_len for part in parts) > TOKENS
        spared = replace(machine, memory_bytes=int(machine.memory_bytes * (1 - SPARE)))
        jobs = [job_of(_with(part, size), data * config.parallel.tensor * pipeline) for part in parts]
        return not all(fits(rank, spared) for job in jobs for rank in everywhere(job, spared))

    return _with(config, sizes[max(0, bisect_right(sizes, False, key=too_large) - 1)])


def gpu(memory_bytes: int) -> Machine:
    """Return a machine of which a GPU's memory is known, and nothing else matters to a micro-batch."""
    known, plenty = MACHINES["a100-80gb"], 2**62
    return replace(known, memory_bytes=memory_bytes, host_memory_bytes=plenty, disk=Disk(plenty, 1.0, 1.0))


def _with(config: Config, micro: int) -> Config:
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro": micro})})
