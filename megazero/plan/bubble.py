"""The seconds that a step waits in a pipeline: for other ranks, and for messages.

With f, b, w the seconds of a micro-batch's forward, of the gradients of its input and of its weights (recomputation
belongs to b), p pipeline ranks, m micro-batches, v chunks, the step waits for others (`schedules/simulate.py` agrees):

    gpipe, 1f1b     (p - 1) (f + b + w)              Narayanan et al. 2021 (arXiv 2104.04473), section 2.2
    interleaved     (p - 1) (f + b + w) / v          ibid.
    zb-h1           (p - 1) max(f + b - w, f)        Qi et al. 2023 (arXiv 2401.10241), table 2
    zb-v            (p - 1) max(f, b, 2 (b - w)) / 2

It waits for messages: in 1f1b for 2 m of them, because a micro-batch's way to the last rank and back is on the
critical path; gpipe 2 (p - 1), interleaved 2 (p v - 1), zb-h1 4 (p - 1), zb-v 4 p.
"""

from megazero.plan.compute import PassTimes
from megazero.plan.job import Job
from megazero.plan.links import Links
from megazero.plan.systems import System
from megazero.schedules.catalogue import make
from megazero.schedules.simulate import Costs, simulate


def regular(job: Job) -> bool:
    """Return whether the closed form of the schedule's bubble is exact: enough micro-batches, and equal chunks."""
    m, p, stages = job.micro_batches, job.pipeline, job.pipeline * job.chunks
    equal = job.shape.layers % stages == 0
    return {
        "gpipe": True,
        "1f1b": True,
        "interleaved": m % p == 0 and equal,
        "zb-h1": m >= p,
        "zb-v": m >= 2 * p - 1 and equal,
    }[job.schedule]


def waits(job: Job, mean: PassTimes) -> float:
    """Return the seconds that the busiest rank waits for others.

    In closed form, or where that is not exact by simulation, of no more micro-batches than fill the pipeline a few
    times.
    """
    p, m = job.pipeline, job.micro_batches
    if p == 1 or regular(job) or job.shape.layers < p * job.chunks:  # the last only in published figures
        return bubble_of(job.schedule, p, job.chunks, mean)
    shown = m if m <= 4 * p else 4 * p + m % p
    schedule = make(job.schedule, p, shown, job.chunks)
    shares = [job.blocks(parts) * p / job.shape.layers for parts in job.layers.parts]
    costs = [Costs(s * mean.forward, s * (mean.input + mean.again), s * mean.weight) for s in shares]
    timeline = simulate(schedule, costs)
    return timeline.makespan - max(timeline.work)


def bubble_of(schedule: str, ranks: int, chunks: int, passes: PassTimes) -> float:
    """Return the seconds that the busiest rank waits in a step if a micro-batch takes each rank `passes`.

    Messages take no time here.

    Exact for as many micro-batches as the schedule is regular for, where the input's part of backward is no shorter
    than the weights'.
    """
    f, b, w = passes.forward, passes.input + passes.again, passes.weight
    each = {
        "gpipe": f + b + w,
        "1f1b": f + b + w,
        "interleaved": (f + b + w) / chunks,
        "zb-h1": max(f + b - w, f),
        "zb-v": max(f, b, 2 * (b - w)) / 2,
    }
    return (ranks - 1) * each[schedule]


def messages(job: Job, links: Links, system: System) -> float:
    """Return the seconds of the messages that the step waits for."""
    p, m, v = job.pipeline, job.micro_batches, job.chunks
    if p == 1:
        return 0.0
    split = job.tensor if job.sequence or system.splits_messages else 1
    size = job.tokens * job.shape.hidden * job.bytes.parameter / split
    counts = {"gpipe": 2 * (p - 1), "1f1b": 2 * m, "interleaved": 2 * (p * v - 1), "zb-h1": 4 * (p - 1), "zb-v": 4 * p}
    return counts[job.schedule] * links.message(size)
