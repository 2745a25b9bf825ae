"""Certify that every layout computes the model that one process does, and one process the model of a reference.

    layouts_of   returns all layouts of up to N ranks that the config's model admits
    sample_of    returns some of them: first those in which most values go together for the first time
    certify      trains the same model on the same data in each layout, and compares it with one process parameter by
                 parameter: initial weights, the first step's gradients, weights after all steps, loss, gradient norm.
                 Compares one process, and what any layout sends as integers, with the independent reference
                 (`reference.py`), because a fault in code that both sides run is the same on both

Tolerances and the measure are in `tolerances.py`; docs/numerics.md says what must be equal to what, and how exactly.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.build.job import job_of, laid_out
from megazero.build.pipeline import check_world
from megazero.config.schema import Config
from megazero.launcher.environment import RankContext
from megazero.launcher.interruption import Interruption
from megazero.launcher.scratch import scratch_folder
from megazero.launcher.spawn import run_local
from megazero.plan.job import Job
from megazero.plan.placements import STAGES
from megazero.plan.search import DISKS, INPUTS_ON_DISKS, OFFLOAD, RECOMPUTE
from megazero.tools.certify.codes import codes_apart
from megazero.tools.certify.comparison import times_of
from megazero.tools.certify.rank import Results, load_results
from megazero.tools.certify.state import Certified, compare_all
from megazero.tools.certify.tolerances import Tolerance, tolerance_of
from megazero.tools.certify.training import Plant, follow_rank, nothing, settings, train_rank
from megazero.tools.planning.allowed import allowed_by_rules

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 2))
OFFLOADS = [
    offload | {"delayed": delayed}
    for offload in OFFLOAD
    for delayed in ((False, True) if offload.get("offload_optimizer") == "cpu" else (False,))
]
OFFLOADS += DISKS[1:]
OFFLOADS += [{"quantize_parameters": "int8"}, {"quantize_gradients": "int8"}]
OFFLOADS += [{"quantize_parameters": "int8", "quantize_gradients": "int4"}]
OFFLOADS += [{"quantize_gradients": "int8", "error_feedback": True}]
_HOST_MB = 256  # for what is on its way to disks
# Sequence parallelism and chunks, of one tensor rank and of several.
TENSOR = {False: [(False, 1)], True: list(product((False, True), (1, 2)))}
_SPREAD = ("tensor", "pipeline", "data", "stage", "shard_ranks", "secondary_ranks", "sequence", "tensor_chunks")
_SPREAD += ("schedule",)
_SHOWN = (*_SPREAD, "chunks", "recompute", "partition")  # of a layout in JSON
_SHOWN += ("parameter_bits", "gradient_bits", "error_feedback")
# In a sample every two values of these that go together occur.
_PAIRED = (*_SPREAD, "recompute", "offloaded", "delayed", "parameter_bits", "gradient_bits", "error_feedback")


@dataclass(frozen=True)
class Row(Certified):
    """The comparison of one layout with one process."""

    layout: Job = field(kw_only=True)

    @property
    def summary(self) -> str:
        worst, times = max(self.times.items(), key=lambda item: item[1])
        return "bitwise equal" if self.bitwise else f"at most {times:.2g} of a tolerance ({worst})"


def layouts_of(config: Config, max_ranks: int) -> list[Job]:
    """Return the config's job in all layouts of 2 to `max_ranks` ranks that the config admits."""
    alone, admits = alone_of(config), admission(config)
    sizes = range(1, max_ranks + 1)
    grids = ((t, p, d) for t, p, d in product(sizes, sizes, sizes) if 1 < t * p * d <= max_ranks)
    found = []
    for tensor, pipeline, data in grids:
        spread = replace(alone, tensor=tensor, pipeline=pipeline, data=data)
        groups = [None, *(n for n in range(1, data) if data % n == 0)]
        stages = list(product(STAGES, groups, [None])) if data > 1 else [(1, None, None)]  # it shares with data ranks
        stages += [(3, None, n) for n in range(2, data + 1) if data % n == 0]
        choices = product(stages, TENSOR[tensor > 1], SCHEDULES, (*RECOMPUTE, INPUTS_ON_DISKS), OFFLOADS)
        for (stage, shard_ranks, secondary_ranks), (sequence, tensor_chunks), (
            schedule,
            chunks,
        ), memory, offload in choices:
            if pipeline == 1 and schedule != "1f1b":
                continue
            if "partition" in memory and (tensor == 1 or sequence):  # it would change nothing
                continue
            if (shard_ranks or data) == 1 and ("quantize_parameters" in offload or "quantize_gradients" in offload):
                continue
            pipelined = {"schedule": schedule, "chunks": chunks}
            sharded = {"stage": stage, "shard_ranks": shard_ranks, "sequence": sequence}
            sharded |= {"secondary_ranks": secondary_ranks, "tensor_chunks": tensor_chunks}
            layout = replace(spread, **pipelined, **sharded, **memory, **offload)
            if admits(layout):
                found.append(layout)
    return found


def alone_of(config: Config) -> Job:
    """Return the config's job on one process."""
    return job_of(config, config.parallel.tensor * config.parallel.pipeline).alone


def sample_of(layouts: Sequence[Job], number: int) -> list[Job]:
    """Return `number` of them: first a cover of every pair of values, then evenly spread over the rest.

    Of fewer layouts all are returned; a number smaller than the cover's gives those of it that have most pairs.
    """
    if len(layouts) <= number:
        return list(layouts)
    chosen = cover_of(layouts)[:number]
    taken = set(chosen)
    rest = [layout for layout in layouts if layout not in taken]
    more = number - len(chosen)
    return chosen + [rest[i * len(rest) // more] for i in range(more)]


def cover_of(layouts: Sequence[Job]) -> list[Job]:
    """Return layouts in which every two values go together that do so in any; those with most new pairs come first."""
    pairs = [_pairs(layout) for layout in layouts]
    missing, chosen = set().union(*pairs), []
    best_first = sorted((-len(own), k) for k, own in enumerate(pairs))  # a heap; new pairs only become fewer
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
    """Return how many pairs of values go together in no chosen layout, and in how many do in some layout."""
    every, covered = (set().union(*map(_pairs, some)) for some in (layouts, chosen))
    return len(every - covered), len(every)


class Certificate:
    """The layouts of one config, each compared with one process that trains once.

    Args:
        steps: steps of training.
        interruption: lets a signal end the work.

    Attributes:
        alone: the config's job on one process, of which a layout is a variant.
    """

    def __init__(self, config: Config, steps: int, interruption: Interruption | None = None):
        self._config, self._steps = settings(config), steps
        self.alone = alone_of(config)
        self._interruption = interruption or Interruption()
        self._alone: dict[bool, Results] = {}
        self._followed: dict[bool, Results] = {}
        torch.set_num_threads(1)  # here, so that nothing waits for threads that a fork does not copy

    def row(self, layout: Job, plant: Plant = nothing) -> Row:
        """Compare what a layout computes with one process, and one process with the independent reference.

        What is sent as integers is compared with that reference in any layout.

        Args:
            plant: what is changed on its ranks before they begin.

        Raises:
            UserError: 303, one process does not get through.
            Interrupted: a signal came.
        """
        model = self._config.model
        assert model.kv_heads is not None, "a resolved config"
        expected = self._reference(layout.delayed) if layout.ranks == 1 else self.one_process(layout.delayed)
        if layout.ranks == 1 and plant is nothing:
            ranks, fault = [self.one_process(layout.delayed)], None
        else:
            ranks, fault = self._trained(layout, plant)
        if fault:
            return Row(layout=layout, fault=fault)
        tolerance = _tolerance(self._config, layout)
        row = Row(layout=layout, **vars(compare_all(ranks, expected, model.heads, model.kv_heads, tolerance)))
        return _with_codes(row, ranks) if layout.gradient_bits or layout.parameter_bits else row

    def one_process(self, delayed: bool) -> Results:
        """Return the results of one process, which is delayed as the layouts are that are compared with it.

        Raises:
            UserError: 303, it does not get through.
        """
        if delayed not in self._alone:
            self._alone[delayed] = self._of_one(*self._trained(one_process(self.alone, delayed=delayed), nothing))
        return self._alone[delayed]

    def _reference(self, delayed: bool) -> Results:
        """Return the results of the independent reference."""
        if delayed not in self._followed:
            found = self._results(
                f"the reference of {self._config.precision.dtype}",
                1,
                lambda folder: lambda place: follow_rank(self._config, self._steps, folder, late=delayed),
            )
            self._followed[delayed] = self._of_one(*found)
        return self._followed[delayed]

    def _of_one(self, ranks: list[Results], fault: str | None) -> Results:
        if fault is not None:
            raise UserError(303, f"one process did not train: {fault}", "see the line above", where="certify")
        return ranks[0]

    def _trained(self, layout: Job, plant: Plant) -> tuple[list[Results], str | None]:
        """Return what each rank of a layout computed; or why it did not."""

        def work(folder: Path) -> Callable[[RankContext], None]:
            config = _configured(self._config, layout, folder)
            return lambda place: train_rank(place, config, self._steps, folder, plant)

        return self._results(f"{self._config.precision.dtype} {layout}", layout.ranks, work)

    def _results(
        self, name: str, ranks: int, work: Callable[[Path], Callable[[RankContext], None]]
    ) -> tuple[list[Results], str | None]:
        """Return what some ranks wrote; or why they did not.

        Args:
            work: called with the folder to write to, returns what each rank runs.
        """
        lines: list[str] = []
        with doing(f"training {name}"), self._interruption.held(), scratch_folder("certify") as folder:
            run, noted = work(folder), lambda statuses, line: lines.append(line)
            code = run_local(ranks, run, noted, signalled=self._interruption.end)
            if code:
                return [], lines[-1] if lines else f"exit code {code}"
            return [load_results(folder, rank) for rank in range(ranks)], None


def one_process(alone: Job, *, delayed: bool) -> Job:
    """Return the job of one process, whose updates may be delayed."""
    return replace(alone, offload_optimizer="cpu", delayed=True) if delayed else alone


def with_one_process(layouts: Sequence[Job]) -> list[Job]:
    """Return layouts of one config with the processes alone in front that they are compared with."""
    delays = dict.fromkeys(layout.delayed for layout in layouts)
    return [*(one_process(layouts[0].alone, delayed=delayed) for delayed in sorted(delays)), *layouts]


def _with_codes(row: Row, ranks: Sequence[Results]) -> Row:
    """Return the row with the comparison of what was sent as integers."""
    layout, times, fault = row.layout, 0.0, row.fault
    bits = (layout.parameter_bits, layout.gradient_bits)
    for where, apart, tolerance in codes_apart(ranks, *bits, feedback=layout.error_feedback):
        times = max(times, times_of(apart, tolerance))
        if fault is None and not apart <= tolerance:
            fault = f"{where}: {apart:.1e} > {tolerance:.0e}"
    return replace(row, fault=fault, times={**row.times, "codes": times})


def certify(
    config: Config, layouts: Sequence[Job], steps: int, interruption: Interruption | None = None
) -> Iterator[Row]:
    """Yield a row for each layout; raises what `Certificate.row` raises."""
    certificate = Certificate(config, steps, interruption)
    return map(certificate.row, layouts)


def table(rows: Sequence[Row], config: Config, steps: int) -> str:
    """Return the rows as a table in Markdown."""
    tolerance = _tolerance(config)
    lines = [
        f"{_counted(rows)}, {steps} steps in {config.precision.dtype}, against one process, and this against an "
        "independent reference: relative differences",
        "",
        "| layout | ranks | bitwise equal | loss | gradient norm | first gradients | weights "
        "| moments | update | its size | beyond its tolerance |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        f"| *tolerance* | | | {tolerance.loss:.0e} | {tolerance.norm:.0e} (first) | {tolerance.gradients:.0e} "
        f"| {tolerance.weights:.0e} | {tolerance.states:.0e} | {tolerance.states:.0e} | {tolerance.sizes:.0e} | |",
    ]
    lines[1:1] = _wider(rows, config)
    for row in rows:
        values = (row.loss, row.norm, row.gradients, row.weights, row.moments, row.update, row.size)
        numbers = " | ".join(_number(v) for v in values)
        bitwise = "yes" if row.bitwise else "no" if row.fault is None or row.loss else ""
        lines.append(f"| {row.layout} | {row.layout.ranks} | {bitwise} | {numbers} | {row.fault or ''} |")
    return "\n".join(lines)


def narrow_table(rows: Sequence[Row], config: Config, steps: int) -> str:
    """Return the rows for a terminal: under each layout its numbers, in 60 columns."""
    tolerance = _tolerance(config)
    limits = (tolerance.loss, tolerance.norm, tolerance.gradients, tolerance.weights)
    lines = [
        f"{_counted(rows)}, {steps} steps in {config.precision.dtype}, against one process,",
        "and this against an independent reference:",
        "relative differences, in an update of Adam's moments too",
        "",
        "layout",
        "   equal   loss   norm  first   wei-   mom-    up-   its",
        "   bits?                grads   ghts   ents   date  size",
        "  allow."
        + "".join(f"{limit:>7.0e}" for limit in (*limits, tolerance.states, tolerance.states))
        + f"{tolerance.sizes:>6.0e}",
    ]
    lines[3:3] = _wider(rows, config)
    for row in rows:
        values = (row.loss, row.norm, row.gradients, row.weights, row.moments, row.update)
        bitwise = "yes" if row.bitwise else "no"
        lines.append(f"{row.layout}, {row.layout.ranks} ranks")
        lines.append(
            f"{bitwise:>8}"
            + "".join(f"{value:>7.0e}" if value else f"{0:>7}" for value in values)
            + (f"{row.size:>6.0e}" if row.size else f"{0:>6}")
        )
        lines += [f"  BEYOND ITS TOLERANCE: {row.fault}"] if row.fault else []
    return "\n".join(lines)


def as_json(rows: Sequence[Row], config: Config, steps: int) -> dict[str, Any]:
    tolerance = asdict(_tolerance(config))
    found = [
        asdict(row) | {"layout": _options(row.layout), "name": str(row.layout), "ranks": row.layout.ranks}
        for row in rows
    ]
    for row in found:  # JSON has no infinity
        row["times"] = {measure: times if math.isfinite(times) else None for measure, times in row["times"].items()}
    return {"steps": steps, "dtype": config.precision.dtype, "tolerance": tolerance, "rows": found}


def _wider(rows: Sequence[Row], config: Config) -> list[str]:
    """Return the line that says that some layouts may differ more, if there are any."""
    most = _tolerance(config)
    odd = any(_tolerance(config, row.layout) != most for row in rows)
    return ["Layouts with integers or 16-bit sums have wider tolerances."] * odd


def _tolerance(config: Config, layout: Job | None = None) -> Tolerance:
    """Return the tolerances of a layout; None: of those that send nothing as integers."""
    job = layout or alone_of(config)
    bits = {"parameter_bits": job.parameter_bits, "gradient_bits": job.gradient_bits}
    summed = layout is None or layout.ranks > 1  # one process sums nothing
    return tolerance_of(config.precision.dtype, reduced=summed and job.bytes.summed < job.bytes.gradient, **bits)


def _configured(config: Config, layout: Job, folder: Path) -> Config:
    """Return a config of a layout whose disks, if it has any, are a folder."""
    changed = laid_out(config, layout)
    if not layout.uses_disks:
        return changed
    offload = changed.zero.offload.model_copy(update={"path": str(folder), "host_mb": _HOST_MB})
    return changed.model_copy(update={"zero": changed.zero.model_copy(update={"offload": offload})})


def admission(config: Config) -> Callable[[Job], bool]:
    """Return a function that says whether a config can be trained in a layout."""
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


def _options(layout: Job) -> dict[str, Any]:
    """Return what a layout is made of."""
    shown = {name: getattr(layout, name) for name in _SHOWN}
    return shown | {
        "inputs_away": {"cpu": "host", "nvme": "disk"}.get(layout.offload),
        "offload": layout.offloaded,
        "delayed": layout.delayed,
    }


def _pairs(layout: Job) -> set[tuple[tuple[str, object], ...]]:
    values = {name: getattr(layout, name) for name in _PAIRED}
    values |= {"inputs": layout.inputs}
    return set(combinations(values.items(), 2))


def _counted(rows: Sequence[Row]) -> str:
    return f"{sum(row.layout.ranks > 1 for row in rows)} layouts"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
