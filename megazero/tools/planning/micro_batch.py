"""Choose the micro-batch and the chunk of the loss where a config leaves them open. Does not import torch."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import gcd, isqrt

from megazero.builders.job import changed, job_of
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.plan.machines import MACHINES, Disk, Machine
from megazero.plan.search import CHUNK, everywhere, fits

TOKENS = 2048  # most of a micro-batch if the device's memory is not known: more do not make a CPU faster
SPARE = 0.05  # share of a device's memory left free, because the plan is within 3 % of a rank's memory
FILLING = 8  # micro-batches for each pipeline rank, which leave a bubble below 12 %


def sized(config: Config, ranks: int, machine: Machine | None = None) -> Config:
    """Return a resolved config with numbers for batch.micro and model.loss_chunk.

    The micro-batch divides a data rank's batch in every stage that gives no size itself. It is the largest that fits
    into the machine by the plan's formulas, or without a machine has at most TOKENS tokens. A pipeline gets at least
    FILLING micro-batches for each of its ranks, if its batch has that many. The loss is computed in chunks only if
    nothing fits without.

    Args:
        machine: a machine with known memory; None: the ranks compute on a CPU, or their device is not known.
    """
    pipeline, course = config.parallel.pipeline, Course(config)
    data = max(1, ranks // (config.parallel.tensor * pipeline))
    parts = [part.config for part in (*course.parts, *course.after)]
    free = [part for part in parts if part.batch.micro is None]
    chunks = (0, CHUNK) if machine is not None and not config.pipeline.schedule.startswith("zb") else (0,)
    if config.model.loss_chunk is not None:
        chunks = (config.model.loss_chunk,)

    def fitting(micro: int, parts: Sequence[Config]) -> list[int]:
        """Return the chunks with which a micro-batch size fits into all of some parts, which may have their own."""
        if machine is None:
            return [*chunks] if all(micro * part.model.seq_len <= TOKENS for part in free) else []
        spared = replace(machine, memory_bytes=int(machine.memory_bytes * (1 - SPARE)))
        world = data * config.parallel.tensor * pipeline

        def fit(chunk: int) -> bool:
            jobs = (job_of(_with(part, part.batch.micro or micro, chunk), world) for part in parts)
            return all(fits(rank, spared) for job in jobs for rank in everywhere(job, spared))

        return [*filter(fit, chunks)]

    micro = config.batch.micro or 1
    if free:
        whole = gcd(*(part.batch.global_ for part in free))
        each = whole // data if whole % data == 0 else 1  # not divisible: no size would help, and MZ-106 reports it
        least = min(each, FILLING * pipeline) if pipeline > 1 else 1
        pairs = ((size, each // size) for size in range(1, isqrt(each) + 1) if each % size == 0)
        sizes = sorted({size for pair in pairs for size in pair if each // size >= least})
        micro = sizes[max(0, bisect_right(sizes, False, key=lambda size: not fitting(size, free)) - 1)]
    return _with(config, config.batch.micro or micro, (fitting(micro, parts) or [chunks[-1]])[0])


def gpu(memory_bytes: int) -> Machine:
    """Return a machine with a GPU's memory, whose other limits never restrict a micro-batch."""
    known, plenty = MACHINES["a100-80gb"], 2**62
    return replace(known, memory_bytes=memory_bytes, host_memory_bytes=plenty, disk=Disk(plenty, 1.0, 1.0))


def _with(config: Config, micro: int, chunk: int) -> Config:
    return changed(config, {"batch.micro": micro, "model.loss_chunk": chunk})
