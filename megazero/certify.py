"""The certificate of equivalence: every layout computes the model that one process does.

    layouts_of   all layouts of up to N ranks that the config's model admits; of too many a sample in which every two
                 values that go together somewhere occur together, and more spread evenly over the rest
    certify      the same model, data and steps on one process and in each layout, compared parameter by parameter:
                 initial weights, the first step's gradients, weights after all steps, loss and gradient norm

Tolerances and the measure are in `tolerances.py`; docs/numerics.md says what must be equal to what, and how exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, product
from typing import Any

import torch

from megazero.build import check_world
from megazero.capability import broken_exclusions, broken_relations
from megazero.certified_rank import Results, load_results, train_rank
from megazero.comparison import Compared, compare
from megazero.config import Config, Memory, Recompute
from megazero.config_file import flatten
from megazero.errors import UserError
from megazero.parallel.scratch import scratch_folder
from megazero.parallel.spawn import run_local
from megazero.tolerances import tolerance_of

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 2))
RECOMPUTES: tuple[tuple[Recompute, bool], ...] = (
    ("none", False),
    ("selective", False),
    ("full", False),
    ("full", True),
)


@dataclass(frozen=True)
class Layout:
    """One way to lay a config out."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    stage: int = 1
    sequence: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    partition: bool = False

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        words = [f"{name}{size}" for name, size in (("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data))]
        words = [word for word in words if not word.endswith("p1")] + [f"zero{self.stage}"] * (self.data > 1)
        words += ["sequence"] * self.sequence + [self.schedule] * (self.pipeline > 1)
        words += [f"recompute-{self.recompute}"] * (self.recompute != "none") + ["Pa"] * self.partition
        return " ".join(words) or "one process"

    def of(self, config: Config) -> Config:
        """The config in this layout."""
        parallel = {"tensor": self.tensor, "pipeline": self.pipeline, "sequence": self.sequence}
        pipeline = {"schedule": self.schedule, "chunks": self.chunks}
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "pipeline": config.pipeline.model_copy(update=pipeline),
                "zero": config.zero.model_copy(update={"stage": self.stage}),
                "memory": Memory(recompute=self.recompute, partition=self.partition),
            }
        )


@dataclass(frozen=True)
class Row(Compared):
    """What one layout computed, beside one process."""

    layout: Layout = field(kw_only=True)

    @property
    def summary(self) -> str:
        return "bitwise equal" if self.bitwise else f"within its tolerance (weights {self.weights:.1e})"


def layouts_of(config: Config, max_ranks: int) -> list[Layout]:
    """All layouts of 2 to `max_ranks` ranks that the config admits."""
    sizes = range(1, max_ranks + 1)
    grids = ((t, p, d) for t, p, d in product(sizes, sizes, sizes) if 1 < t * p * d <= max_ranks)
    found = []
    for tensor, pipeline, data in grids:
        stages = range(4) if data > 1 else (1,)  # a stage shares with data ranks
        choices = product(stages, (False, True), SCHEDULES, RECOMPUTES)
        for stage, sequence, (schedule, chunks), (recompute, partition) in choices:
            if (sequence and tensor == 1) or (pipeline == 1 and schedule != "1f1b"):
                continue
            if partition and (tensor == 1 or sequence):  # it would change nothing
                continue
            layout = Layout(tensor, pipeline, data, stage, sequence, schedule, chunks, recompute, partition)
            if _admits(layout.of(config), layout.size):
                found.append(layout)
    return found


def sample_of(layouts: Sequence[Layout], number: int) -> list[Layout]:
    """At most about `number` of them, or all: first those with every pair of values, then evenly spread over the rest.

    The cover may have more than `number`.
    """
    if len(layouts) <= number:
        return list(layouts)
    missing = set().union(*map(_pairs, layouts))
    chosen: list[Layout] = []
    while missing:
        best = max(layouts, key=lambda layout: len(_pairs(layout) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    rest = [layout for layout in layouts if layout not in chosen]
    more = max(number - len(chosen), 0)
    return chosen + [rest[i * len(rest) // more] for i in range(more)]


def certify(config: Config, layouts: Sequence[Layout], steps: int) -> Iterator[Row]:
    """A row for each layout.

    Raises:
        UserError: 303, one process does not get through.
    """
    torch.set_num_threads(1)  # here, so that nothing waits for threads that a fork does not copy
    alone, fault = _results(config, Layout(), steps)
    if fault is not None:
        raise UserError(303, f"one process did not train: {fault}", "see the line above", where="certify")
    for layout in layouts:
        ranks, fault = _results(config, layout, steps)
        if fault:
            yield Row(layout=layout, fault=fault)
        else:
            tolerance = tolerance_of(config.precision.dtype)
            yield Row(layout=layout, **vars(compare(ranks, alone[0], config.model.heads, _kv_heads(config), tolerance)))


def table(rows: Sequence[Row], config: Config, steps: int) -> str:
    """In Markdown."""
    tolerance = tolerance_of(config.precision.dtype)
    lines = [
        f"{len(rows)} layouts, {steps} steps in {config.precision.dtype}, against one process: relative differences",
        "",
        "| layout | ranks | bitwise equal | loss | gradient norm | first gradients | weights | beyond its tolerance |",
        "|---|---|---|---|---|---|---|---|",
        f"| *tolerance* | | | {tolerance.loss:.0e} | {tolerance.norm:.0e} (first) | {tolerance.gradients:.0e} "
        f"| {tolerance.weights:.0e} | |",
    ]
    for row in rows:
        numbers = " | ".join(_number(v) for v in (row.loss, row.norm, row.gradients, row.weights))
        bitwise = "yes" if row.bitwise else "no" if row.fault is None or row.loss else ""
        lines.append(f"| {row.layout} | {row.layout.size} | {bitwise} | {numbers} | {row.fault or ''} |")
    return "\n".join(lines)


def as_json(rows: Sequence[Row], config: Config, steps: int) -> dict[str, Any]:
    tolerance = asdict(tolerance_of(config.precision.dtype))
    found = [asdict(row) | {"name": str(row.layout), "ranks": row.layout.size} for row in rows]
    return {"steps": steps, "dtype": config.precision.dtype, "tolerance": tolerance, "rows": found}


def _results(config: Config, layout: Layout, steps: int) -> tuple[list[Results], str | None]:
    """What each rank computed; or why it did not."""
    lines: list[str] = []
    with scratch_folder("certify") as folder:
        of_layout = layout.of(config)
        code = run_local(
            layout.size,
            lambda place: train_rank(place, of_layout, steps, folder),
            lambda standings, line: lines.append(line),
        )
        if code:
            return [], lines[-1] if lines else f"exit code {code}"
        return [load_results(folder, rank) for rank in range(layout.size)], None


def _admits(config: Config, size: int) -> bool:
    values = flatten(config)
    if broken_relations(values) or broken_exclusions(values):
        return False
    try:
        check_world(config, size)
    except UserError:
        return False
    return True


def _pairs(layout: Layout) -> set[tuple[tuple[str, object], ...]]:
    memory = f"{layout.recompute} {layout.partition}"
    sizes = [(name, getattr(layout, name)) for name in ("tensor", "pipeline", "data", "stage", "sequence", "schedule")]
    return set(combinations([*sizes, ("memory", memory)], 2))


def _kv_heads(config: Config) -> int:
    assert config.model.kv_heads is not None, "a resolved config"
    return config.model.kv_heads


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
