"""Choose the micro-batch of a config whose batch.micro is null. Does not import torch."""

from bisect import bisect_right
from dataclasses import replace
from math import gcd, isqrt

from megazero.builders.job import job_of
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.plan.machines import MACHINES, Disk, Machine
from megazero.plan.search import everywhere, fits

TOKENS = 2048  # most of a micro-batch if the device's memory is not known: more do not make a CPU faster
SPARE = 0.05  # share of a device's memory left free, because the plan is within 3 % of a rank's memory
FILLING = 8  # micro-batches for each pipeline rank, which leave a bubble below 12 %


def with_micro(config: Config, ranks: int, machine: Machine | None = None) -> Config:
    """Return a resolved config with a number for batch.micro.

    The size divides a data rank's batch in every stage that gives no size itself. It is the largest that fits into the
    machine by the plan's formulas, or without a machine has at most TOKENS tokens. A pipeline gets at least FILLING
    micro-batches for each of its ranks, if its batch has that many.

    Args:
        machine: a machine with known memory; None: the ranks compute on a CPU, or their device is not known.
    """
    if config.batch.micro is not None:
        return config
    pipeline, course = config.parallel.pipeline, Course(config)
    data = max(1, ranks // (config.parallel.tensor * pipeline))
    parts = [part.config for part in (*course.parts, *course.after) if part.config.batch.micro is None]
    whole = gcd(*(part.batch.global_ for part in parts))
    each = whole // data if whole % data == 0 else 1  # not divisible: no size would help, and MZ-106 reports it
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
    """Return a machine with a GPU's memory, whose other limits never restrict a micro-batch."""
    known, plenty = MACHINES["a100-80gb"], 2**62
    return replace(known, memory_bytes=memory_bytes, host_memory_bytes=plenty, disk=Disk(plenty, 1.0, 1.0))


def _with(config: Config, micro: int) -> Config:
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro": micro})})
