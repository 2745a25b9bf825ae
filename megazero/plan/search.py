"""The fastest layouts that fit, by trying them all.

Tried are all sizes of the axes that divide the ranks (tensor ranks stay within a node unless nothing fits there), all
schedules, chunks, stages, micro-batches in powers of two, sequence parallelism. Of what saves memory and costs time
the least that is enough is taken, in the order of its price: nothing, selective recompute, full, Pa, Pa+cpu,
optimizer state on the host, with stage 3 parameters too. Whoever needs less is faster, so nothing is passed over;
the tests compare with all combinations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megazero.plan.layout import Layout
from megazero.plan.machines import Machine
from megazero.plan.memory import RankMemory, memory
from megazero.plan.time import StepTime, step_time

# What a job on a device cannot have: the driver's and the communication libraries' own memory, and holes.
RESERVED_BYTES, RESERVED_SHARE = 800 * 2**20, 0.04
_CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4, 6, 8), "zb-h1": (1,), "zb-v": (2,)}
SAVINGS: tuple[dict[str, object], ...] = (
    {"recompute": "none"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "partition": True},
    {"recompute": "full", "partition": True, "offload": True},
    {"recompute": "full", "partition": True, "offload": True, "offload_optimizer": True},
    {"recompute": "full", "partition": True, "offload": True, "offload_optimizer": True, "offload_parameters": True},
)


@dataclass(frozen=True)
class Found:
    """A layout with its time and the memory of its fullest rank."""

    layout: Layout
    time: StepTime
    fullest: RankMemory


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        best: that fit, fastest first.
        excluded: would be faster than the best, without saving memory, and do not fit; fastest first.
        tried: layouts in all.
    """

    best: list[Found]
    excluded: list[Found]
    tried: int


def usable(machine: Machine) -> float:
    """Bytes of a device that tensors can have."""
    return machine.memory_bytes * (1 - RESERVED_SHARE) - RESERVED_BYTES


def fullest(layout: Layout) -> RankMemory:
    """Of the ranks of a pipeline the one with most on its device: the first, the last, or the one between."""
    ranks = {0, layout.pipeline // 2, layout.pipeline - 1}
    return max((memory(layout, rank) for rank in ranks), key=lambda found: found.peak)


def fits(found: RankMemory, machine: Machine) -> bool:
    return found.peak <= usable(machine) and found.host <= machine.host_memory_bytes


def search(job: Layout, ranks: int, machine: Machine, allowed: Callable[[Layout], bool], count: int = 10) -> Search:
    """The fastest layouts of a job's model and global batch on some ranks.

    Args:
        job: its sizes of axes, stage, micro-batch, schedule, recompute and offload are not looked at.
        allowed: whether a layout can be run.

    Raises:
        ValueError: the machine has no peak for the job's precision.
    """
    for widest in (machine.devices_per_node, ranks):
        layouts = [one for one in spreads(job, ranks, widest) if not _hopeless(one, machine) and allowed(one)]
        best, excluded = _fastest(layouts, machine, count)
        if best:
            break
    return Search(best, excluded, len(layouts))


def _fastest(layouts: list[Layout], machine: Machine, count: int) -> tuple[list[Found], list[Found]]:
    """The fastest that fit, and those that would be faster than all of these. No layout is faster than it is with no
    saving, so none is looked at that is slower without than enough others are with theirs.
    """
    bounds = [(step_time(layout, machine), layout) for layout in layouts]
    best: list[Found] = []
    excluded: list[Found] = []
    for time, layout in sorted(bounds, key=lambda pair: pair[0].step_s):
        if len(best) >= count and time.step_s > best[count - 1].time.step_s:
            break
        options = [replace(layout, **saving) for saving in savings(layout)]  # type: ignore[arg-type]
        if not fits(fullest(options[-1]), machine):
            options = options[:1]  # nothing between will either
        for candidate in options:
            found = fullest(candidate)
            if fits(found, machine):
                best.append(Found(candidate, step_time(candidate, machine), found))
                best.sort(key=lambda one: (one.time.step_s, one.fullest.peak))
                break
            if candidate == layout and len(excluded) < count:
                excluded.append(Found(layout, time, found))
    limit = best[0].time.step_s if best else float("inf")
    return best[:count], [one for one in excluded if one.time.step_s < limit]


def spreads(job: Layout, ranks: int, widest: int) -> Iterator[Layout]:
    """Every way to spread a job, before anything is done about memory."""
    layers, shape = job.shape.layers, job.shape
    job = Layout(shape, job.bytes, global_batch=job.global_batch, dropout=job.dropout, documents=job.documents)
    for tensor in (t for t in _divisors(ranks) if t <= widest and not shape.kv_heads % t and not shape.ffn % t):
        for pipeline in (p for p in _divisors(ranks // tensor) if p <= layers):
            data = ranks // (tensor * pipeline)
            if job.global_batch % data:
                continue
            for schedule, chunks in _schedules(pipeline, layers):
                for stage in (1, 2, 3) if data > 1 else (0,):
                    for micro in _micros(job.global_batch // data):
                        for sequence in (False, True) if tensor > 1 and not shape.seq_len % tensor else (False,):
                            yield replace(
                                job,
                                tensor=tensor,
                                pipeline=pipeline,
                                data=data,
                                schedule=schedule,
                                chunks=chunks,
                                stage=stage,
                                micro_batch=micro,
                                sequence=sequence,
                            )


def savings(layout: Layout) -> Iterator[dict[str, object]]:
    """What can be done about a layout's memory, cheapest first."""
    for saving in SAVINGS:
        if saving.get("offload_parameters") and layout.stage != 3:
            continue
        if saving.get("offload_optimizer") and layout.stage == 0:
            continue
        if saving.get("partition") and not saving.get("offload") and (layout.sequence or layout.tensor == 1):
            continue  # nothing to split
        yield saving


def _schedules(pipeline: int, layers: int) -> Iterator[tuple[str, int]]:
    if pipeline == 1:
        yield "1f1b", 1
        return
    yield from ((name, v) for name, counts in _CHUNKS.items() for v in counts if pipeline * v <= layers)


def _micros(sequences: int) -> list[int]:
    """Sizes of a micro-batch: powers of two that divide a data rank's share, and the whole share if it is small."""
    return [2**k for k in range(7) if not sequences % 2**k]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if not number % n]


def _hopeless(layout: Layout, machine: Machine) -> bool:
    """Even half of an even share of the model states is more than there is, device and host together."""
    sizes = layout.bytes
    shard = layout.data if layout.stage == 3 else 1
    each = sizes.parameter / shard + sizes.gradient / (layout.data if layout.stage >= 2 else 1)
    each += sizes.optimizer / (layout.data if layout.stage else 1)
    held = layout.shape.parameters() / (layout.tensor * layout.pipeline) * each
    return held / 2 > usable(machine) + machine.host_memory_bytes
