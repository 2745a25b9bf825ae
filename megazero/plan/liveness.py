"""Count the live micro-batches of each stage of a pipeline rank at each moment of a step."""

from dataclasses import dataclass
from functools import cache

from megazero.plan.job import Job
from megazero.schedules.actions import Kind
from megazero.schedules.catalogue import make


@dataclass(frozen=True)
class Moment:
    """The moment of one stage's backward.

    Attributes:
        stage: number of the stage.
        apart: this backward computes input gradients only; weight gradients follow later.
        kept: (stage, micro-batches between forward and backward, this one included) for each stage of the rank.
        noted: (stage, micro-batches whose weight gradients are still due) for each stage of the rank.
    """

    stage: int
    apart: bool
    kept: tuple[tuple[int, int], ...]
    noted: tuple[tuple[int, int], ...]


def liveness(job: Job, rank: int) -> tuple[list[Moment], dict[int, int]]:
    """Return (the distinct moments of a rank's step, {stage: the most micro-batches that it keeps at once}).

    gpipe keeps all micro-batches. For other schedules a walk through 2 x ranks x (1 or 2, with chunks) micro-batches is
    enough: a step with more of them keeps no more.
    """
    m = job.micro_batches
    if job.schedule == "gpipe":
        return [Moment(rank, False, ((rank, m),), ())], {rank: m}
    enough = 2 * job.pipeline * (2 if job.chunks > 1 else 1)
    return _walk(job.schedule, job.pipeline, min(m, enough), job.chunks, rank)


@cache
def _walk(name: str, ranks: int, micro_batches: int, chunks: int, rank: int) -> tuple[list[Moment], dict[int, int]]:
    schedule = _made(name, ranks, micro_batches, chunks)
    kept = {stage: 0 for stage, where in enumerate(schedule.rank_of) if where == rank}
    noted, most, moments = dict(kept), dict(kept), {}
    for action in schedule.ranks[rank]:
        stage = action.stage
        if action.kind is Kind.FORWARD:
            kept[stage] += 1
            most[stage] = max(most[stage], kept[stage])
        elif action.kind is Kind.BACKWARD_WEIGHT:
            noted[stage] -= 1
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            apart = action.kind is Kind.BACKWARD_INPUT
            moments[Moment(stage, apart, tuple(kept.items()), tuple(noted.items()))] = None
            kept[stage] -= 1
            noted[stage] += apart
    return [*moments], most


_made = cache(make)
