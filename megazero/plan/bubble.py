"""The seconds that a step waits in a pipeline: for other ranks, and for messages.

f, b and w are the seconds of a micro-batch's forward, input gradients (recompute included) and weight gradients. With
p pipeline ranks, m micro-batches and v chunks a step waits for other ranks (`schedules/simulate.py` agrees):

    gpipe, 1f1b     (p - 1) (f + b + w)              Narayanan et al. 2021 (arXiv 2104.04473), section 2.2
    interleaved     (p - 1) (f + b + w) / v          ibid.
    zb-h1           (p - 1) max(f + b - w, f)        Qi et al. 2023 (arXiv 2401.10241), table 2
    zb-v            (p - 1) max(f, b, 2 (b - w)) / 2

The step also waits for messages: for 2 m in 1f1b, because a micro-batch's path to the last rank and back is on the
critical path; for 2 (p - 1) in gpipe, 2 (p v - 1) in interleaved, 4 (p - 1) in zb-h1 and 4 p in zb-v.
"""

from megazero.plan.compute import PassTimes
from megazero.plan.flops import block_costs
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
        "interleaved": m % p == 0 and equal,
        "zb-h1": m >= p,
        "zb-v": m >= 2 * p - 1 and equal,
    }.get(job.schedule, True)


def waits(job: Job, mean: PassTimes) -> float:
    """Return the seconds that the busiest rank waits for others.

    Use the closed form where it is exact; elsewhere simulate fewer than 5 p micro-batches, which fill the pipeline a
    few times.
    """
    p, m = job.pipeline, job.micro_batches
    if p == 1 or regular(job) or job.shape.layers < p * job.chunks:  # so few layers only in published rows
        return bubble_of(job.schedule, p, job.chunks, mean)
    schedule = make(job.schedule, p, m if m <= 4 * p else 4 * p + m % p, job.chunks)
    blocks, _ = block_costs(job.shape)
    whole = sum(blocks)
    shares = [sum(blocks[max(parts.start, 1) - 1 : parts.stop - 1]) * p / whole for parts in job.layers.parts]
    costs = [Costs(s * mean.forward, s * (mean.input + mean.again), s * mean.weight) for s in shares]
    timeline = simulate(schedule, costs)
    return timeline.makespan - max(timeline.work)


def bubble_of(schedule: str, ranks: int, chunks: int, passes: PassTimes) -> float:
    """Return the seconds that the busiest rank waits in a step if each rank takes `passes` for a micro-batch.

    Messages take no time here. The result is exact if the schedule is regular for this number of micro-batches, and
    the input gradients take at least as long as the weight gradients.
    """
    f, b, w = passes.forward, passes.input + passes.again, passes.weight
    each = {
        "interleaved": (f + b + w) / chunks,
        "zb-h1": max(f + b - w, f),
        "zb-v": max(f, b, 2 * (b - w)) / 2,
    }
    return (ranks - 1) * each.get(schedule, f + b + w)


def messages(job: Job, links: Links, system: System) -> float:
    """Return the seconds of the messages that the step waits for."""
    p, m, v = job.pipeline, job.micro_batches, job.chunks
    if p == 1:
        return 0.0
    split = job.tensor if job.sequence or system.splits_messages else 1
    size = job.tokens * job.shape.hidden * job.bytes.parameter / split
    counts = {"gpipe": 2 * (p - 1), "1f1b": 2 * m, "interleaved": 2 * (p * v - 1), "zb-h1": 4 * (p - 1), "zb-v": 4 * p}
    return counts[job.schedule] * links.message(size)
