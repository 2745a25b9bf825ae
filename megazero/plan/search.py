"""Find the fastest layouts that fit, by trying them all.

The search tries all axis sizes that divide the ranks (tensor ranks stay within a node unless nothing fits there),
schedules where they are regular (`bubble.regular`), stages, micro-batches that divide a data rank's share (up to 64),
and sequence parallelism. To save memory it tries no offload, and the optimizer state, the parameters or both on the
host; with each it uses the least recompute that fits (none, selective, full, Pa, Pa+cpu), since more only costs time,
and the loss in chunks only where it does not fit without. Where nothing fits and the machine has disks, it puts the
optimizer state there, then the parameters too, and the inputs that recompute keeps (Pa+nvme) where the host has no room
for them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile

from megazero.plan.bubble import regular
from megazero.plan.job import Job
from megazero.plan.layers import parameters
from megazero.plan.machines import Machine
from megazero.plan.memory import RankMemory, planned
from megazero.plan.placements import stages_that_shard
from megazero.plan.states import states
from megazero.plan.time import StepTime, step_time

# Memory that a job cannot use: the driver's own, loaded kernels, and gaps between tensors.
RESERVED_BYTES, RESERVED_SHARE = 800 * 2**20, 0.04
CHUNK = 2048  # tokens: most of a product's speed, and a small part of the memory of all logits
_CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4, 6, 8), "zb-h1": (1,), "zb-v": (2,)}
_MOST_SEQUENCES = 64
_Options = Mapping[str, object]  # fields of a job
_PA: _Options = {"recompute": "full", "partition": True}
RECOMPUTE: tuple[_Options, ...] = (
    *({"recompute": kind} for kind in ("none", "selective", "full")),
    _PA,
    {**_PA, "offload": "cpu"},
)
INPUTS_ON_DISKS: _Options = {**_PA, "offload": "nvme"}
_OPTIMIZER, _PARAMETERS = {"offload_optimizer": "cpu"}, {"offload_parameters": "cpu"}
OFFLOAD: tuple[_Options, ...] = ({}, _OPTIMIZER, _PARAMETERS, _OPTIMIZER | _PARAMETERS)
DISKS: tuple[_Options, ...] = tuple(dict.fromkeys(away, "nvme") for away in ({}, _OPTIMIZER, _OPTIMIZER | _PARAMETERS))


@dataclass(frozen=True)
class Found:
    """A layout with its time and the memory of its fullest rank."""

    job: Job
    time: StepTime
    fullest: RankMemory


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        best: the layouts that fit, fastest first.
        tried: number of layouts tried.
        nearest: where nothing fits, the layout that needs least with all savings; None if there is no layout.
    """

    best: list[Found]
    tried: int
    nearest: Found | None = None


def usable(machine: Machine) -> float:
    """Return the bytes of a device that tensors can use."""
    return machine.memory_bytes * (1 - RESERVED_SHARE) - RESERVED_BYTES


def everywhere(layout: Job, machine: Machine) -> Iterator[RankMemory]:
    """Yield the memory of every pipeline rank on a machine, the ranks that are likely to need most first."""
    likely = dict.fromkeys((0, layout.pipeline - 1, layout.pipeline // 2))
    for rank in (*likely, *(rank for rank in range(layout.pipeline) if rank not in likely)):
        yield planned(layout, rank, machine)


def fullest(ranks: Iterable[RankMemory]) -> RankMemory:
    """Return the memory of the rank that needs most on its device."""
    return max(ranks, key=lambda rank: rank.peak)


def fits(found: RankMemory, machine: Machine) -> bool:
    """Return whether a rank fits into a device, its host and its disks."""
    return _lack(found, machine) <= 1


def search(job: Job, ranks: int, machine: Machine, allowed: Callable[[Job], bool], count: int = 10) -> Search:
    """Search for the fastest layouts of a job's model and global batch on `ranks` ranks.

    Args:
        job: its axis sizes, stage, micro-batch, schedule, recompute and offload are ignored.
        allowed: returns whether a layout can be run.

    Raises:
        ValueError: the machine has no peak for the job's precision.
    """
    layouts: list[Job] = []
    tiers = (OFFLOAD, DISKS) if machine.disk_bytes else (OFFLOAD,)
    for tier, widest in product(tiers, dict.fromkeys((min(machine.devices_per_node, ranks), ranks))):
        room = usable(machine) + machine.host_memory_bytes + (machine.disk_bytes if tier is DISKS else 0.0)
        layouts = [one for one in spreads(job, ranks, widest, machine.devices_per_node) if not _hopeless(one, room)]
        if best := _fastest(layouts, machine, allowed, count, tier):
            return Search(best, len(layouts))
    frugal = {
        layout: _lack(planned(layout, 0, machine), machine)
        for one in spreads(job, ranks, ranks, machine.devices_per_node)
        for *_, layout in savings(one, tiers[-1])
    }
    least = next((layout for layout in sorted(frugal, key=lambda one: frugal[one]) if allowed(layout)), None)
    nearest = None if least is None else Found(least, step_time(least, machine), fullest(everywhere(least, machine)))
    return Search([], len(layouts), nearest)


def _fastest(
    layouts: list[Job],
    machine: Machine,
    allowed: Callable[[Job], bool],
    count: int,
    tier: Sequence[Mapping[str, object]],
) -> list[Found]:
    """Return the `count` fastest layouts that fit.

    Args:
        tier: the ways to offload; the first offloads nothing.

    Savings only make a layout slower. So a layout is not tried if it is slower without savings than `count` layouts
    that fit.
    """
    bounds = [(step_time(layout, machine), layout) for layout in layouts]
    best: list[Found] = []
    for time, layout in sorted(bounds, key=lambda pair: pair[0].step_s):
        if len(best) >= count and time.step_s > best[count - 1].time.step_s:
            break
        plain, *others = savings(layout, tier)
        found = _least(plain, machine, allowed)
        ways = [] if found is None else [found]
        if found is None or found.job != layout:
            for options in others:  # more offload is worth it only where it is faster
                one = _least(options, machine, allowed)
                if one is not None and all(one.time.step_s < way.time.step_s for way in ways):
                    ways.append(one)
        best = sorted([*best, *ways], key=lambda one: (one.time.step_s, one.fullest.peak))
    return best[:count]


def _lack(found: RankMemory, machine: Machine) -> float:
    """Return needed bytes divided by available bytes: the largest ratio of device, host and disks."""
    there = found.disk / machine.disk_bytes if machine.disk_bytes else float("inf") if found.disk else 0.0
    return max(found.peak / usable(machine), found.host / machine.host_memory_bytes, there)


def _least(options: list[Job], machine: Machine, allowed: Callable[[Job], bool]) -> Found | None:
    """Return the first of `options` that is allowed and fits, or None."""
    for candidate in options:
        if planned(candidate, 0, machine).peak > usable(machine) or not allowed(candidate):
            continue
        ranks = list(takewhile(lambda rank: fits(rank, machine), everywhere(candidate, machine)))
        if len(ranks) == candidate.pipeline:
            return Found(candidate, step_time(candidate, machine), fullest(ranks))
    return None


def spreads(job: Job, ranks: int, widest: int, node: int) -> Iterator[Job]:
    """Yield every way to spread a job over the ranks, without recompute or offload.

    `widest` is the largest number of tensor ranks, `node` the number of devices in a node.
    """
    layers, shape, job = job.shape.layers, job.shape, job.alone
    sharded = stages_that_shard("optimizer")
    for tensor in (t for t in _divisors(ranks) if t <= widest and _spreads(job, t)):
        for pipeline in (p for p in _divisors(ranks // tensor) if p <= layers):
            data = ranks // (tensor * pipeline)
            if job.global_batch % data:
                continue
            sizes = {"tensor": tensor, "pipeline": pipeline, "data": data}
            # States are sharded over all data ranks, or over those of one node.
            groups = (None, node // tensor) if 1 < node // tensor < data and not data % (node // tensor) else (None,)
            sequences = (False, True) if tensor > 1 and not shape.seq_len % tensor else (False,)
            for schedule, chunks in _schedules(pipeline, layers):
                for micro in _divisors(job.global_batch // data, _MOST_SEQUENCES):
                    cut = replace(job, **sizes, schedule=schedule, chunks=chunks, micro_batch=micro)
                    if not regular(cut):
                        continue
                    stages = product(sharded, groups) if data > 1 else [(0, None)]
                    for (stage, shard_ranks), sequence in product(stages, sequences):
                        yield replace(cut, stage=stage, shard_ranks=shard_ranks, sequence=sequence)


def _spreads(job: Job, ranks: int) -> bool:
    """Return whether so many tensor ranks can have equal parts of a block; with full QK-norms, whole heads."""
    shape, (sharing, rest) = job.shape, divmod(ranks, job.shape.kv_heads)
    shared = rest == 0 and 2 * shape.head_dim % sharing == 0 and shape.qk_norm != "full"
    return not (shape.heads % ranks or shape.ffn % ranks) and (shape.kv_heads % ranks == 0 or shared)


def savings(layout: Job, tier: Sequence[Mapping[str, object]] = OFFLOAD) -> Iterator[list[Job]]:
    """Yield, for each way to offload, the layout with each kind of recompute and chunk of the loss, cheapest first."""
    kinds = (*RECOMPUTE, INPUTS_ON_DISKS) if tier is DISKS else RECOMPUTE
    for offload in tier:
        rests = "parameters" if "offload_parameters" in offload else "optimizer"
        stage = max(layout.stage, min(stages_that_shard(rests))) if offload else layout.stage
        if layout.data > 1 and stage != layout.stage:
            continue  # that stage is tried by itself
        yield [
            replace(layout, stage=stage, loss_chunk=chunk, **offload, **recompute)  # type: ignore[arg-type]
            for recompute, chunk in product(kinds, (0, CHUNK) if layout.tokens > CHUNK else (0,))
            if "partition" not in recompute or "offload" in recompute or (layout.tensor > 1 and not layout.sequence)
        ]


def _schedules(pipeline: int, layers: int) -> list[tuple[str, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    return [(name, v) for name, counts in _CHUNKS.items() for v in counts if pipeline * v <= layers]


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [n for n in range(1, min(number, most or number) + 1) if not number % n]


def _hopeless(layout: Job, room: float) -> bool:
    """Return whether even half of a rank's even share of the model states exceeds `room` bytes."""
    share = parameters(layout.shape) // (layout.tensor * layout.pipeline * layout.shard)
    return sum(states(share, layout.shard, layout.stage, layout.bytes).values()) / 2 > room
