"""Report the cost of a pipeline's step: actions, bytes, bubble, memory; as text, JSON, or a picture.

Bytes are those that one rank sends in a step, as the ledger of a run counts them (`traffic.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megazero.plan.job import Job
from megazero.plan.traffic import traffic
from megazero.schedules.actions import Schedule
from megazero.schedules.layers import lowered
from megazero.schedules.simulate import Costs, Timeline, peak_live, simulate

_SHOWN_RANKS, _SHOWN_CHARACTERS = 8, 46
_TABLE_LEGEND = (
    "work: passes of a block; live: most micro-batches of one stage with activations in memory",
    "MB: sent by one rank in a step, without the gathers after the update in stages 1 and 2",
)
_ACTION_LEGEND = (
    "each rank's actions in order: stage, action, micro-batch",
    "F forward, B backward, I and W the two parts of backward (gradients of inputs, of weights)",
    "SEND_F, RECV_F outputs to and from a neighbour; SEND_B, RECV_B gradients; REDUCE over the data axis; TIE of the "
    "embedding shared by the first and the last stage",
)


def report(job: Job) -> tuple[dict[str, Any], Schedule, Timeline]:
    """Return the report of a job's step as a JSON object, with its schedule and timeline.

    Work and bubbles assume that a block's three passes take equal time. Each of `ranks` has its `actions`, the parts of
    its `stages`, the most live micro-batches of any one of its stages (`peak_live`), its `work`, and its `bytes`.
    """
    layers = job.layers
    schedule = lowered(layers, job.micro_batches, each=job.shards_gradients, tied=job.shape.tie_embeddings)
    timeline = simulate(schedule, [Costs(blocks, blocks, blocks) for blocks in layers.costs])
    peaks = peak_live(schedule)
    ranks = [
        {
            "actions": [str(action) for action in schedule.ranks[rank]],
            "stages": {stage: _words(parts, job.shape.layers) for stage, parts in layers.of_rank(rank).items()},
            "peak_live": peaks[rank],
            "work": timeline.work[rank],
            "bytes": _bytes(job, rank),
        }
        for rank in range(layers.ranks)
    ]
    found = {
        "schedule": layers.schedule,
        "micro_batches": job.micro_batches,
        "data": job.data,
        "zero_stage": job.stage,
        "bubble": timeline.bubble,
        "bubble_without_common_end": timeline.bubble_without_common_end,
        "ranks": ranks,
    }
    return found, schedule, timeline


def as_text(found: Mapping[str, Any], *, every: bool = False) -> str:
    """Return the schedule and its bubble, what each rank holds, what it costs, and the lists of actions.

    Args:
        every: show all actions of all ranks; otherwise the first actions of the first ranks.
    """
    ranks = found["ranks"]
    said = f"{found['schedule']} over {len(ranks)} ranks, {found['micro_batches']} micro-batches"
    lines = [f"{said}: bubble {found['bubble']:.1%} of the work", ""]
    for number, rank in enumerate(ranks):
        stages = "; ".join(f"stage {stage}: {words}" for stage, words in rank["stages"].items())
        lines.append(f"rank {number} has {stages}")
    lines += ["", "rank   work  live  sent MB  reduced  gathered     tied"]
    for number, rank in enumerate(ranks):
        sent, reduced, gathered, tied = (size / 1e6 for size in rank["bytes"].values())
        line = f"{number:<5}{rank['work']:>6.0f}{rank['peak_live']:>6}"
        lines.append(f"{line}{sent:>9.2f}{reduced:>9.2f}{gathered:>10.2f}{tied:>9.2f}")
    return "\n".join([*lines, *_TABLE_LEGEND, "", *_ACTION_LEGEND, *_actions(ranks, every)])


def _actions(ranks: Sequence[Mapping[str, Any]], every: bool) -> Iterator[str]:
    for number, rank in enumerate(ranks[: None if every else _SHOWN_RANKS]):
        words = "".join(f" {action}" for action in rank["actions"])
        if not every and len(words) > _SHOWN_CHARACTERS:
            words = f"{words[:_SHOWN_CHARACTERS].rpartition(' ')[0]} ..."
        yield f"rank {number}:{words}"
    if not every:
        most = max(len(rank["actions"]) for rank in ranks)
        yield f"--all shows all actions: {len(ranks)} ranks, up to {most} actions each"


def _bytes(job: Job, rank: int) -> dict[str, int]:
    """Return the bytes that a rank sends in a step: between stages, to reduce, to gather, for a tied weight."""
    found = traffic(job, rank)

    def sent(purpose: str, *axes: str) -> int:
        return sum(found.get(axis, {}).get(purpose, 0) for axis in axes)

    along_data = ("data", "shard", "replica")
    return {
        "sent": sent("activations", "pipeline") + sent("gradients", "pipeline"),
        "reduced": sent("gradients", *along_data),
        "gathered": sent("parameters", *along_data) if job.shards_parameters else 0,
        "tied": sent("tied", "ends"),
    }


def _words(parts: range, layers: int) -> str:
    blocks = [i - 1 for i in parts if 0 < i <= layers]
    words = ["embedding"] * (0 in parts)
    words.append(f"blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}")
    return " + ".join(words + ["head"] * (layers + 1 in parts))
