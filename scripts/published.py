"""Published figures of training runs, with which plans are compared: `tests/plan/published/*.csv`."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megazero.plan.compute import Compute
from megazero.plan.job import Bytes, Job
from megazero.plan.machines import Machine
from megazero.plan.model import Shape
from megazero.plan.systems import SYSTEMS, System
from megazero.plan.time import StepTime, step_time

FOLDER = Path(__file__).resolve().parents[1] / "tests/plan/published"
FILES = ("throughput.csv", "systems.csv")
MEMORY = "memory GiB"
CONTEXT = 1573 / 1024  # GiB of the CUDA context: nvidia-smi counts it, a plan's peak does not (BigScience's log)
QUANTITIES: dict[str, Callable[[StepTime, Job, float], float]] = {
    "hfu TFLOP/s": lambda found, job, peak: found.hfu * peak / 1e12,
    "model TFLOP/s": lambda found, job, peak: found.tflops_per_device,
    "seconds": lambda found, job, peak: found.step_s,
    "samples/s": lambda found, job, peak: job.global_batch / found.step_s / job.ranks,
}


@dataclass(frozen=True)
class Row:
    """A published figure and its job; `fitted`: a fit uses it."""

    table: str
    name: str
    machine: str
    job: Job
    system: System
    quantity: str
    published: float
    fitted: bool

    @property
    def own_kernels(self) -> bool:
        """Return whether its system has its own shares on this device; the device's fit then does not use the row."""
        return self.machine in self.system.reached

    def predicted(self, machine: Machine, system: System | None = None) -> float:
        """Return the planner's figure, for the row's own system or for another."""
        system = system or self.system
        if self.quantity == MEMORY:
            ends = {0, self.job.pipeline - 1}
            return max(system.memory(self.job, rank).peak for rank in ends) / 2**30 + CONTEXT
        peak = machine.peak(self.job.bytes.parameter)
        assert peak is not None, "a row is in 16 bits"
        return QUANTITIES[self.quantity](step_time(self.job, machine, system), self.job, peak)

    def at_hfu(self, hfu: float, machine: Machine) -> float:
        """Return the baseline's figure: all FLOPs of the step at one share of the peak."""
        compute = Compute(self.job, machine, self.system)
        model, done = compute.flops()
        tokens = self.job.global_batch * self.job.shape.seq_len / self.job.ranks
        seconds = tokens * done / (hfu * compute.peak)
        rates = {"hfu TFLOP/s": done, "model TFLOP/s": model}
        if self.quantity in rates:
            return tokens * rates[self.quantity] / seconds / 1e12
        return seconds if self.quantity == "seconds" else tokens / self.job.shape.seq_len / seconds


def rows() -> list[Row]:
    """Return the rows of the published tables."""
    found = []
    for name in FILES:
        with (FOLDER / name).open(encoding="utf-8") as file:
            found += [_row(row) for row in csv.DictReader(line for line in file if not line.startswith("#"))]
    return found


def _row(row: dict[str, str]) -> Row:
    numbers = {name: int(text) for name, text in row.items() if text.isdigit()}
    hidden, heads = numbers["hidden"], numbers["heads"]
    newer = "kv_heads" in numbers
    shape = Shape(
        *(numbers["layers"], hidden, heads, numbers.get("kv_heads", heads), 4 * hidden),
        *(numbers["vocab"], numbers["seq_len"]),
        position="rotary" if newer else "learned",
        dropout=0.0 if row["software"] in ("fsdp", "megatron-core") else 0.1,
        tie_embeddings=not newer,
    )
    same = {name: numbers[name] for name in ("tensor", "pipeline", "chunks", "stage", "micro_batch", "global_batch")}
    yes = {name: bool(numbers[name]) for name in ("sequence", "partition")}
    data = numbers["devices"] // (numbers["tensor"] * numbers["pipeline"])
    how: dict[str, Any] = {
        "schedule": row["schedule"],
        "recompute": row["recompute"],
        "offload": "cpu" if numbers["offload"] else "none",
    }
    job = Job(shape, Bytes(2, numbers.get("gradient", 2), 4), data=data, **same, **yes, **how)
    what = (row["quantity"], float(row["published"]), row["fitted"] == "1")
    return Row(row["table"], row["row"], row["machine"], job, SYSTEMS[row["software"]], *what)


def every_machine(machines: Mapping[str, Machine]) -> dict[str, Machine]:
    """Return the machines and the A100 with 40 GB, which only rows use; it has the shares of the 80 GB version."""
    small = {"memory_bytes": 40 * 2**30, "memory_bandwidth": 1555e9}  # NVIDIA A100 data sheet, Jun 2021, SXM
    return {**machines, "a100-40gb": replace(machines["a100-80gb"], name="a100-40gb", **small)}
