"""Report what a pipeline's step costs: actions with their bytes, bubble, memory; as text, JSON, or a picture.

Bytes are what one rank sends (or, gathering and reducing, its share by the ring formula), exactly as the ledger of a
run counts them: from the sizes of the units of the model, padding included. In stage 3 a stage gathers all its
units for each forward, and all for each backward but the embedding, which needs none, and the head, which stays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megazero.base.terminal import wrapped
from megazero.plan.job import Job
from megazero.schedules.actions import Kind, Schedule
from megazero.schedules.layers import lowered
from megazero.schedules.lower import TrafficBill, add_bill
from megazero.schedules.simulate import Costs, Timeline, peak_live, simulate

_SHOWN_RANKS, _SHOWN_CHARACTERS = 8, 46
_TABLE_LEGEND = (
    "work: in passes of a block; live: micro-batches of one stage whose activations are there at most",
    "MB: of one rank in a step, beside what stages 1 and 2 gather after the update",
)
_ACTION_LEGEND = (
    "each rank's actions in their order: the stage, what it does, the micro-batch, [bytes it sends or gathers first]",
    "F forward, B backward, I and W its two parts (gradients of inputs, of weights)",
    "SEND_F, RECV_F outputs to and from a neighbour; SEND_B, RECV_B gradients; REDUCE over the data axis; TIE of the "
    "embedding that first and last stage share",
)
_WHAT = {
    Kind.SEND_FORWARD: "sent",
    Kind.SEND_BACKWARD: "sent",
    Kind.REDUCE: "reduced",
    Kind.TIE: "tied",
    Kind.FORWARD: "gathered",
    Kind.BACKWARD: "gathered",
    Kind.BACKWARD_INPUT: "gathered",
}


@dataclass(frozen=True)
class RankReport:
    """One rank's step: its actions, the stages' parts, micro-batches of one of its stages that are live at most."""

    actions: list[str]
    stages: dict[int, str]
    peak_live: int
    work: float
    bytes: dict[str, int]


@dataclass(frozen=True)
class Report:
    """A step of a pipeline. Work and bubbles suppose that a block's three passes cost alike."""

    schedule: str
    micro_batches: int
    data: int
    zero_stage: int
    bubble: float
    bubble_without_common_end: float
    ranks: list[RankReport]


def report(job: Job) -> tuple[Report, Schedule, Timeline]:
    """Return the report of a step of a job, and what it was made of."""
    layers, m = job.layers, job.micro_batches
    schedule = add_bill(lowered(layers, m, each=job.shards_gradients, tied=job.shape.tie_embeddings), bill_of(job))
    timeline = simulate(schedule, costs_of(job))
    peaks = peak_live(schedule)
    ranks = [
        RankReport(
            [str(action) for action in schedule.ranks[rank]],
            {stage: _words(parts, job.shape.layers) for stage, parts in layers.of_rank(rank).items()},
            peaks[rank],
            timeline.work[rank],
            _bytes(schedule, rank),
        )
        for rank in range(layers.ranks)
    ]
    bubbles = timeline.bubble, timeline.bubble_without_common_end
    return Report(layers.schedule, m, job.data, job.stage, *bubbles, ranks), schedule, timeline


def costs_of(job: Job) -> list[Costs]:
    """Return the costs of each stage, in blocks."""
    head, last = job.shape.head_in_blocks(), job.shape.layers + 1
    blocks = [sum(1.0 for i in parts if 0 < i < last) + (head if last in parts else 0.0) for parts in job.layers.parts]
    return [Costs(cost, cost, cost) for cost in blocks]


def bill_of(job: Job) -> TrafficBill:
    """Return the bytes that each action sends or gathers."""
    layers, data, shape, last = job.layers, job.shard, job.shape, job.shape.layers + 1
    on_path = [{unit.name: unit.padded(data) for unit in job.units([range(i, i + 1)])} for i in range(last + 1)]
    sizes = {name: size for part in on_path for name, size in part.items()}
    share = (data - 1) / data

    def of(parts: range, *, without: Sequence[int] = ()) -> int:
        return sum(sum(on_path[i].values()) for i in parts if i not in without)

    def own(index: int) -> list[int]:
        """Return the elements of each unit whose gradients are complete with this stage: the first of a rank."""
        earlier = [layers.parts[k] for k in range(index) if layers.rank_of[k] == layers.rank_of[index]]
        taken = {name for parts in earlier for i in parts for name in on_path[i]}
        return [sizes[name] for name in {n for i in layers.parts[index] for n in on_path[i]} - taken]

    times, item = 1 if job.shards_optimizer else 2, job.bytes
    gathered = item.parameter if job.shards_parameters else 0
    stages = range(len(layers.parts))
    sequence = shape.seq_len // (job.tensor if job.sequence else 1)
    tie = sizes.get("tied", 0) // (data if job.shards_optimizer else 1)
    return TrafficBill(
        sequence * job.micro_batch * shape.hidden * item.parameter,
        [round(times * share * sum(own(k))) * item.summed for k in stages],
        [round(share * of(layers.parts[k])) * gathered for k in stages],
        [round(share * of(layers.parts[k], without=(0, last))) * gathered for k in stages],
        tie * item.summed,
        [2 * (job.replicas - 1) * sum(-(-n // data // job.replicas) for n in own(k)) * item.summed for k in stages],
    )


def as_json(found: Report) -> dict[str, Any]:
    return asdict(found)


def as_text(found: Report, columns: int | None = None, *, every: bool = False) -> str:
    """Return the schedule in a sentence, what each rank holds, what it costs, and the lists of actions.

    Args:
        columns: to break sentences at; None: nowhere.
        every: all actions of all ranks; otherwise the first of the first ranks.
    """
    lines = [*wrapped(summary(found), columns), ""]
    for number, rank in enumerate(found.ranks):
        stages = "; ".join(f"stage {stage}: {words}" for stage, words in rank.stages.items())
        lines += wrapped(f"rank {number} has {stages}", columns, "    ")
    lines += ["", "rank   work  live  sent MB  reduced  gathered     tied"]
    for number, rank in enumerate(found.ranks):
        sent, reduced, gathered, tied = (rank.bytes[kind] / 1e6 for kind in ("sent", "reduced", "gathered", "tied"))
        line = f"{number:<5}{rank.work:>6.0f}{rank.peak_live:>6}"
        lines.append(f"{line}{sent:>9.2f}{reduced:>9.2f}{gathered:>10.2f}{tied:>9.2f}")
    for legend in _TABLE_LEGEND:
        lines += wrapped(legend, columns, "  ")
    return "\n".join([*lines, "", *_actions(found, columns, every)])


def _actions(found: Report, columns: int | None, every: bool) -> Iterator[str]:
    """Return what every rank does, behind a legend of the words."""
    for legend in _ACTION_LEGEND:
        yield from wrapped(legend, columns, "    ")
    for number, rank in enumerate(found.ranks[: None if every else _SHOWN_RANKS]):
        words = "".join(f" {action}" for action in rank.actions)
        if not every and len(words) > _SHOWN_CHARACTERS:
            words = f"{words[:_SHOWN_CHARACTERS].rpartition(' ')[0]} ..."
        yield f"rank {number}:{words}"
    if not every:
        most = max(len(rank.actions) for rank in found.ranks)
        yield from wrapped(f"--all shows all of them: {len(found.ranks)} ranks, up to {most} actions each", columns)


def summary(found: Report) -> str:
    """Return one line: the schedule, its bubble, and what a micro-batch costs."""
    stage = found.zero_stage
    per = {2: "reduces gradients after each micro-batch", 3: "gathers parameters and reduces gradients for each"}
    bill = f"; ZeRO stage {stage} {per[stage]}" if stage in per and found.data > 1 else ""
    most = max(found.ranks, key=lambda rank: sum(rank.bytes.values()))
    parts = ", ".join(f"{size / 1e6:,.1f} MB {kind}" for kind, size in most.bytes.items() if size)
    return (
        f"{found.schedule} over {len(found.ranks)} rank{'s' * (len(found.ranks) > 1)}, "
        f"{found.micro_batches} micro-batches: "
        f"bubble {found.bubble:.1%} of the work{bill}; a step of the rank that sends most: {parts or 'nothing'}"
    )


def _bytes(schedule: Schedule, rank: int) -> dict[str, int]:
    sizes: dict[str, int] = dict.fromkeys(("sent", "reduced", "gathered", "tied"), 0)
    for action in schedule.ranks[rank]:
        if action.kind in _WHAT:
            sizes[_WHAT[action.kind]] += action.size
    return sizes


def _words(parts: range, layers: int) -> str:
    blocks = [i - 1 for i in parts if 0 < i <= layers]
    words = ["embedding"] * (0 in parts)
    words.append(f"blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}")
    return " + ".join(words + ["head"] * (layers + 1 in parts))
