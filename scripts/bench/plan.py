"""Compare `plan` with real steps of layouts on this machine: seconds, and bytes of the rank with the most.

    python scripts/bench/plan.py [--steps 9] [--only PATTERN ...] [--json] [--save]

`megazero doctor --write` measures the machine before and after the steps, with as many concurrent ranks as the layouts
have; the faster of both figures counts. Each layout trains twice, at least six seconds each, on random tokens: once in
the order of the list and once in reverse. Its ranks have so many threads that they use all cores together. Seconds are
the median of the steps of the faster run. Bytes are those of the ledger plus the peak of what a step allocates in
addition (`observe/allocations.py`), on the rank with the most. fp32, no dropout, our kernels.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation


from megazero.builders.job import job_of
from megazero.comm.grid import Grid, single
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.observe.allocations import Allocations
from megazero.plan.job import Job
from megazero.plan.machines import Link, Machine
from megazero.plan.memory import memory
from megazero.plan.time import step_time
from megazero.tools.planning.machine_file import machine_of
from scripts.bench import figures
from scripts.bench.harness import cpu_times, foreign_share
from scripts.bench.ours import engine_step, grid_of
from scripts.bench.processes import Call, System, running

WARM_UP, STEPS = 2, 9
LEAST = 6.0  # least seconds of steps: from time to time a machine is slow for some seconds
BASE = ("layers=4", "hidden=512", "heads=8", "vocab=4096", "seq_len=256", "dropout=0.0")  # options of `model`
PARTS = ("norm=rmsnorm", "activation=swiglu", "position=rotary", "kv_heads=2")


@dataclass(frozen=True)
class Layout:
    """A layout to plan and to train.

    Attributes:
        options: overrides of the shipped config `tiny` with the model of `BASE`.
    """

    name: str
    ranks: int
    options: tuple[str, ...] = ()

    def config(self) -> Config:
        """Return the config with these options."""
        options = [*(f"model.{size}" for size in BASE), "batch.global=4", "batch.micro=4", *self.options]
        return load("tiny", options)

    def job(self) -> Job:
        """Return the planner's job for this layout."""
        return job_of(self.config(), self.ranks)

    def planned_bytes(self) -> int:
        """Return the planned bytes of the rank with the most."""
        job = self.job()
        return max(memory(job, rank).peak for rank in range(job.pipeline))


def _on_two(name: str, *options: str) -> Layout:
    return Layout(name, 2, options)


LAYOUTS = (
    Layout("base", 1),
    Layout("micro-batch 1", 1, ("batch.global=1", "batch.micro=1")),
    Layout("micro-batch 8", 1, ("batch.global=8", "batch.micro=8")),
    Layout("4 micro-batches", 1, ("batch.global=8", "batch.micro=2")),
    Layout("narrow and deep", 1, ("model.hidden=256", "model.layers=12", "model.heads=4")),
    Layout("wide", 1, ("model.hidden=1024", "model.layers=2", "model.heads=16", "batch.global=2", "batch.micro=2")),
    Layout("long sequences", 1, ("model.seq_len=1024", "batch.global=1", "batch.micro=1")),
    Layout("short sequences", 1, ("model.seq_len=64", "batch.global=16", "batch.micro=16")),
    Layout("large vocabulary", 1, ("model.vocab=16384",)),
    Layout("parts of Llama", 1, tuple(f"model.{part}" for part in PARTS)),
    Layout("recompute selective", 1, ("memory.recompute=selective",)),
    Layout("recompute full", 1, ("memory.recompute=full",)),
    *(_on_two(f"stage {stage}", f"zero.stage={stage}", "batch.micro=2") for stage in range(4)),
    _on_two("stage 3, recompute full", "zero.stage=3", "memory.recompute=full", "batch.micro=2"),
    _on_two("stage 2, 2 micro-batches", "zero.stage=2", "batch.micro=1"),
    _on_two("tensor", "parallel.tensor=2"),
    _on_two("tensor, sequence", "parallel.tensor=2", "parallel.sequence=true"),
    _on_two("pipeline, 1f1b", "parallel.pipeline=2", "batch.micro=1", "batch.global=8"),
    _on_two("pipeline, zb-h1", "parallel.pipeline=2", "pipeline.schedule=zb-h1", "batch.micro=1", "batch.global=8"),
)


@dataclass(frozen=True)
class Compared:
    """A layout's plan and its real step: seconds, and bytes of the rank with the most.

    Attributes:
        foreign: the share of the machine's processors that other processes took during the steps.
    """

    name: str
    ranks: int
    planned_s: float
    seconds: float
    planned_bytes: int
    bytes: int
    foreign: float

    @property
    def of_time(self) -> float:
        """Return planned over real seconds."""
        return self.planned_s / self.seconds

    @property
    def of_bytes(self) -> float:
        """Return planned over real bytes."""
        return self.planned_bytes / self.bytes

    def columns(self) -> dict[str, float]:
        """Return the figures of the table by column head."""
        times = {
            "ranks": self.ranks,
            "planned s": self.planned_s,
            "step s": self.seconds,
            "planned / step": self.of_time,
        }
        sizes = {"planned MB": self.planned_bytes / 1e6, "MB": self.bytes / 1e6, "planned / held": self.of_bytes}
        return times | sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", default=["*"], help="shell patterns of layouts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--save", action="store_true", help="save the measurements in docs/figures")
    options = parser.parse_args()
    chosen = [one for one in LAYOUTS if any(fnmatchcase(one.name, pattern) for pattern in options.only)]
    report = report_of(compare(chosen, options.steps), options.steps)
    return figures.tell([report], as_json=options.json, save=options.save)


def compare(layouts: Sequence[Layout], steps: int) -> list[Compared]:
    """Measure the machine, train each layout twice, compare its faster run with its plan."""
    ranks = sorted({layout.ranks for layout in layouts})
    before = {count: measured_machine(count) for count in ranks}
    first = {layout.name: train(layout, steps) for layout in layouts}
    again = {layout.name: train(layout, steps) for layout in reversed(layouts)}
    real = {name: min(first[name], again[name]) for name in first}  # by seconds: interference only slows a step
    machines = {count: faster(before[count], measured_machine(count)) for count in ranks}
    found = []
    for layout in layouts:
        seconds, size, foreign = real[layout.name]
        planned = step_time(layout.job(), machines[layout.ranks]).step_s
        found.append(Compared(layout.name, layout.ranks, planned, seconds, layout.planned_bytes(), size, foreign))
    return found


def threads_of(ranks: int) -> int:
    """Return the threads per rank with which `ranks` ranks use all cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def measured_machine(ranks: int) -> Machine:
    """Return this machine as `doctor` measures it with `ranks` concurrent ranks."""
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
        path = f"{folder}/machine.yaml"
        threads = ["env", f"OMP_NUM_THREADS={threads_of(ranks)}"]  # as in `train`, whatever the caller's environment
        doctor = [sys.executable, "-m", "megazero", "doctor", "--nproc", str(ranks), "--write", path, "--run", folder]
        done = subprocess.run([*threads, *doctor], cwd=figures.ROOT, capture_output=True, text=True)
        if not Path(path).exists():
            raise SystemExit(f"doctor measured nothing: {done.stderr.strip()[-200:]}")
        return machine_of(path)


def faster(first: Machine, second: Machine) -> Machine:
    """Return the better figures of two measurements: interference only makes a machine slower."""
    peaks = {dtype: max(rate, second.peak_flops[dtype]) for dtype, rate in first.peak_flops.items()}
    links = {
        name: Link(max(a.bandwidth, b.bandwidth), min(a.latency, b.latency))
        for name, a, b in (
            ("in_node", first.in_node, second.in_node),
            ("cross_node", first.cross_node, second.cross_node),
        )
    }
    attention = max(one.reached.fused_attention * one.peak_flops["fp32"] for one in (first, second)) / peaks["fp32"]
    return replace(
        first,
        peak_flops=peaks,
        memory_bandwidth=max(first.memory_bandwidth, second.memory_bandwidth),
        host_link_bandwidth=max(first.host_link_bandwidth, second.host_link_bandwidth),
        launch=min(first.launch, second.launch),
        reached=replace(first.reached, attention=attention),
        **links,
    )


def train(layout: Layout, steps: int, least: float = LEAST) -> tuple[float, int, float]:
    """Return the median seconds of a layout's steps, the bytes of its rank with the most, and the share of other work.

    Args:
        steps: least number of steps.
        least: least seconds of all steps together.
    """
    threads = threads_of(layout.ranks)
    arguments = (layout.name,) if layout.ranks > 1 else (layout.name, 0, 1, "")
    system = System(layout.name, calls_of, arguments, threads, layout.ranks, times_itself=True, has_loss=False)
    with running([system]) as (one,):
        for _ in range(WARM_UP):
            one.do("step")
        before = cpu_times()
        done, began = [], time.perf_counter()
        while len(done) < steps or time.perf_counter() - began < least:
            done.append(one.do("step"))
        foreign = foreign_share(before, cpu_times(), sum(step.processor for step in done))
        return statistics.median(step.seconds for step in done), int(one.do("bytes").seconds), foreign


def calls_of(name: str, rank: int, size: int, store: str) -> Mapping[str, Call]:
    """Return the calls of a rank: "step" returns the seconds of a step, "bytes" the bytes that a step takes."""
    layout = next(one for one in LAYOUTS if one.name == name)
    config = layout.config()
    axes = config.parallel
    grid = single() if size == 1 else grid_of(rank, size, store, axes.tensor, axes.pipeline)
    step = engine_step(config, grid)

    def timed() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return {"step": timed, "bytes": lambda: held(step, grid)}


def held(step: Call, grid: Grid) -> float:
    """Return the device bytes of this rank: those of the ledger plus the peak of allocations in a step."""
    with Allocations() as counted:
        step()
    sizes = grid.comm.ledger.bytes.items()
    on_device = (size.now for kind, size in sizes if kind != "staging" and not kind.startswith("host_"))
    return float(sum(on_device) + counted.peak)


def report_of(found: Sequence[Compared], steps: int) -> figures.Report:
    """Return the report of some layouts."""
    rows = [{"system": one.name, "columns": one.columns()} for one in found]
    return figures.report_of("layouts", rows, launches=2, rounds=steps, foreign=[one.foreign for one in found])


if __name__ == "__main__":
    sys.exit(main())
