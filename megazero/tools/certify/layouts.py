"""Choose layouts of a config to certify.

layouts_of   returns all layouts of up to N ranks that the config's model admits
sample_of    returns some of them: first those with the most new pairs of option values
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import combinations, product
from typing import Any

from megazero.base.errors import UserError
from megazero.builders.job import job_of, laid_out
from megazero.builders.pipeline import check_world
from megazero.config.schema import Config
from megazero.plan.job import Job
from megazero.plan.placements import STAGES
from megazero.plan.search import DISKS, INPUTS_ON_DISKS, OFFLOAD, RECOMPUTE
from megazero.tools.planning.job import allowed_by_rules

SCHEDULES = [
    {"schedule": name, "chunks": 1 + (name in ("zb-v", "interleaved"))}
    for name in ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved")
]
TENSOR = [{"sequence": sequence, "tensor_chunks": chunks} for sequence, chunks in product((False, True), (1, 2))]
MEMORY = (*RECOMPUTE, INPUTS_ON_DISKS)
OFFLOADS = [
    *OFFLOAD,
    *({**each, "delayed": True} for each in OFFLOAD if each.get("offload_optimizer") == "cpu"),
    *DISKS[1:],
]
CODES = [{"quantize_parameters": "int8"}, {"quantize_gradients": "int8"}]
CODES += [{"quantize_parameters": "int8", "quantize_gradients": "int4"}]
CODES += [{"quantize_gradients": "int8", "error_feedback": True}]
# The options in which layouts differ. The cover contains every pair of values of `_PAIRED` that occurs in any layout.
OPTIONS = ("tensor", "pipeline", "data", "stage", "shard_ranks", "secondary_ranks", "sequence", "tensor_chunks")
OPTIONS += ("schedule", "recompute", "delayed", "parameter_bits", "gradient_bits", "error_feedback")
_PAIRED = (*OPTIONS, "loss_chunk", "offloaded")


def layouts_of(config: Config, max_ranks: int) -> list[Job]:
    """Return the config's job in all layouts of 2 to `max_ranks` ranks that the config admits."""
    alone, admits = alone_of(config), admission(config)
    sizes = range(1, max_ranks + 1)
    grids = ((t, p, d) for t, p, d in product(sizes, sizes, sizes) if 1 < t * p * d <= max_ranks)
    found = []
    for tensor, pipeline, data in grids:
        groups = [None, *(n for n in range(1, data) if data % n == 0)]
        sharded: list[dict[str, Any]] = [{"stage": 1}]
        if data > 1:  # there are ranks to shard over
            sharded = [{"stage": stage, "shard_ranks": n} for stage, n in product(STAGES, groups)]
            sharded += [{"stage": 3, "secondary_ranks": n} for n in range(2, data + 1) if data % n == 0]
        split, schedules = TENSOR if tensor > 1 else TENSOR[:1], SCHEDULES if pipeline > 1 else SCHEDULES[:1]
        scored = {"loss_chunk": alone.tokens // 2 - 1}  # two equal chunks and a short one
        for parts in product(sharded, split, schedules, MEMORY, [*OFFLOADS, scored, *CODES]):
            options = {name: value for part in parts for name, value in part.items()}
            if "partition" in options and (tensor == 1 or options["sequence"]):  # it would change nothing
                continue
            if (options.get("shard_ranks") or data) == 1 and parts[-1] in CODES:  # nothing is sent
                continue
            layout = replace(alone, tensor=tensor, pipeline=pipeline, data=data, **options)
            if admits(layout):
                found.append(layout)
    return found


def alone_of(config: Config) -> Job:
    """Return the config's job on one process."""
    return job_of(config, config.parallel.tensor * config.parallel.pipeline).alone


def sample_of(layouts: Sequence[Job], number: int) -> list[Job]:
    """Return `number` of the layouts: first a cover of all pairs of option values, then evenly spaced ones.

    If there are fewer layouts, return all. If the cover has more, return its first, which add the most new pairs.
    """
    if len(layouts) <= number:
        return list(layouts)
    chosen = cover_of(layouts)[:number]
    taken = set(chosen)
    rest = [layout for layout in layouts if layout not in taken]
    more = number - len(chosen)
    return chosen + [rest[i * len(rest) // more] for i in range(more)]


def cover_of(layouts: Sequence[Job]) -> list[Job]:
    """Return layouts that together contain every pair of values in `layouts`, those with the most new pairs first."""
    pairs = [_pairs(layout) for layout in layouts]
    missing, chosen = set().union(*pairs), []
    best_first = sorted((-len(own), k) for k, own in enumerate(pairs))  # a heap; numbers of new pairs only fall
    while missing:
        _, k = heappop(best_first)
        gain = (-len(pairs[k] & missing), k)
        if best_first and gain > best_first[0]:
            heappush(best_first, gain)
        else:
            chosen.append(layouts[k])
            missing -= pairs[k]
    return chosen


def pairs_missed(layouts: Sequence[Job], chosen: Sequence[Job]) -> tuple[int, int]:
    """Return the number of pairs of values that no chosen layout contains, and of pairs in all layouts."""
    every, covered = (set().union(*map(_pairs, some)) for some in (layouts, chosen))
    return len(every - covered), len(every)


def one_process(alone: Job, *, delayed: bool) -> Job:
    """Return the job of one process; with `delayed`, its optimizer is on the host and its updates are delayed."""
    return replace(alone, offload_optimizer="cpu", delayed=True) if delayed else alone


def with_one_process(layouts: Sequence[Job]) -> list[Job]:
    """Return the layouts, preceded by the one-process layouts that they are compared with."""
    delays = dict.fromkeys(layout.delayed for layout in layouts)
    return [*(one_process(layouts[0].alone, delayed=delayed) for delayed in sorted(delays)), *layouts]


def admission(config: Config) -> Callable[[Job], bool]:
    """Return a function that returns whether a config can be trained in a layout."""
    allowed = allowed_by_rules(config)

    def admits(layout: Job) -> bool:
        if not allowed(layout):
            return False
        try:
            check_world(laid_out(config, layout), layout.ranks)
        except UserError:
            return False
        return True

    return admits


def _pairs(layout: Job) -> set[tuple[tuple[str, object], ...]]:
    inputs: tuple[str, object] = ("inputs", (layout.partition, layout.offload))
    return set(combinations([*((name, getattr(layout, name)) for name in _PAIRED), inputs], 2))
