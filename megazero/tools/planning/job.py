"""`megazero plan`: will a job fit, how fast will it be, what will it cost; which layout is the fastest that fits.

This is arithmetic only (`plan/`), without torch or a device. docs/planning.md compares a plan's memory with the ledgers
of real runs, and its time with published runs.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from megazero.base.errors import UserError
from megazero.builders.job import job_of, options_of
from megazero.config.flat import flatten
from megazero.config.rules import broken_rules
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.plan.activations import logits
from megazero.plan.cache import cache_bytes
from megazero.plan.communicators import communicators
from megazero.plan.job import Job
from megazero.plan.layers import parameters
from megazero.plan.links import split_by_node
from megazero.plan.machines import MACHINES, Machine
from megazero.plan.memory import RankMemory, planned
from megazero.plan.search import Found, Search, fits, fullest, savings, search, usable
from megazero.plan.states import saved
from megazero.plan.systems import OURS, TIME_ERROR, UNCERTAINTY, System
from megazero.plan.time import StepTime, step_time
from megazero.plan.traffic import traffic
from megazero.tools.planning.micro_batch import sized

BUFFERS = ("pool", "matrices", "secondary", "residuals", "angles", "graphs", "communicators", "batch", "allocator")
ACTIVATIONS = ("activations", "inputs", "scores")
SHARED_RATE = 1e9  # bytes/s from one node into a file system that all nodes see: assumed where no disk was measured
_STEPS, _SAVES = 2, 1.5  # steps and saves that a stopped run may still take, as for run.time_limit
_MARGIN_SECONDS, LEAST_LEAD = 30, 120


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a job.

    Attributes:
        bytes: weights in full precision and the optimizers' state.
        rate: bytes/s from one node.
        measured: the rate is that of a disk in the machine's file.
        save_s: seconds that all ranks need to copy their parts to the host and write them.
        lead_s: seconds before its end at which a job needs its signal: two steps, 1.5 saves and a margin.
    """

    bytes: int
    rate: float
    measured: bool
    save_s: float
    lead_s: int


def checkpoint_of(job: Job, machine: Machine, step_s: float) -> Checkpoint:
    """Return the checkpoint of a job; each rank writes an equal part of it."""
    size = saved(job.shape, job.optimizers, job.bytes)
    in_node = min(job.ranks, machine.devices_per_node)
    measured = None if machine.name in MACHINES else machine.disk
    rate = SHARED_RATE if measured is None else measured.write * in_node
    part = size / job.ranks
    save_s = part / machine.host_link_bandwidth + part * in_node / rate
    seconds = _STEPS * step_s + _SAVES * save_s + _MARGIN_SECONDS
    return Checkpoint(size, rate, measured is not None, save_s, max(LEAST_LEAD, 10 * math.ceil(seconds / 10)))


@dataclass(frozen=True)
class Plan:
    """The plan of a job.

    Attributes:
        system: the software that trains.
        ranks: memory of each rank of a pipeline.
        tokens, steps: the budget, and the steps that it takes.
        stage: the planned stage of the run, in words; "": the run has no stages.
    """

    job: Job
    machine: Machine
    system: System
    ranks: list[RankMemory]
    tokens: float
    steps: int
    stage: str

    @property
    def fullest(self) -> RankMemory:
        """Return the memory of the rank that holds most on its device."""
        return fullest(self.ranks)

    @cached_property
    def time(self) -> StepTime:
        """Return the time of a step."""
        return step_time(self.job, self.machine, self.system)

    @property
    def fits(self) -> bool:
        """True if every rank fits into a device, its host and its disks."""
        return all(fits(rank, self.machine) for rank in self.ranks)

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the size of a checkpoint and the seconds to save it."""
        return checkpoint_of(self.job, self.machine, self.time.step_s)


def allowed_by_rules(config: Config) -> Callable[[Job], bool]:
    """Return a function that returns whether the config's rules allow the layout of a job."""
    values = flatten(config)
    return lambda layout: not broken_rules(values | options_of(layout))


def plan(config: Config, ranks: int, machine: Machine, tokens: float | None = None, system: System = OURS) -> Plan:
    """Plan a config's job; with stages, plan the one that needs most memory.

    Args:
        tokens: number of tokens to train on; None: as many as the config's steps take.
        system: the software that trains.

    Raises:
        UserError: 118, the machine has no peak for the config's precision, or no disks that the config uses.
    """
    _check_peak(config, machine)
    course = Course(sized(config, ranks, machine))
    parts = [(part, job := job_of(part.config, ranks), _ranks(job, machine, system)) for part in course.parts]
    part, job, found = max(parts, key=lambda each: fullest(each[2]).peak)
    words = f"{part.name or 'after the last stage'}, which needs most memory" if len(parts) > 1 else ""
    whole = float(course.tokens(config.run.steps)) if tokens is None else tokens
    return Plan(job, machine, system, found, whole, _steps(course, whole), words)


def _steps(course: Course, tokens: float) -> int:
    """Return the number of steps that `tokens` tokens take; the last part of a run goes on for as long as needed."""
    part = next(part for part in reversed(course.parts) if part.tokens <= tokens)
    return part.first + math.ceil((tokens - part.tokens) / part.tokens_per_step)


def find(config: Config, ranks: int, machine: Machine) -> Search:
    """Search for the fastest layouts of a config's model and batch.

    Raises:
        UserError: 118, the machine has no peak for the config's precision; 341, nothing fits.
    """
    # Delayed updates are another algorithm, which the user chooses, not a search.
    split = config.parallel.tensor * config.parallel.pipeline
    job = replace(job_of(sized(config, split), split), delayed=False, cuda_graphs=False)
    _check_peak(config, machine)
    found = search(job, ranks, machine, allowed_by_rules(config))
    if not found.best:
        raise UserError(341, *_shortage(found, job, ranks, machine), where="plan")
    return found


def _shortage(found: Search, job: Job, ranks: int, machine: Machine) -> tuple[str, str]:
    """Return a text about the missing memory where nothing fits, and one about what to do."""
    shape, near = job.shape, found.nearest
    if near is None:
        sizes = f"{shape.layers} layers, {shape.kv_heads} key-value heads and batch.global {job.global_batch}"
        return f"{sizes} cannot be spread over {ranks} ranks evenly", "change the number of ranks or batch.global"
    needs = [("", near.fullest.peak, usable(machine)), ("of the host ", near.fullest.host, machine.host_memory_bytes)]
    needs += [("of the disks ", near.fullest.disk, machine.disk_bytes)] if near.fullest.disk else []
    least = ", ".join(f"{where}{need / 1e9:,.1f} GB of {there / 1e9:,.1f}" for where, need, there in needs)
    what = f"{parameters(shape) / 1e9:.4g}B parameters on {ranks} {machine.name}: the least need is {least}"
    return what, "use more devices, or devices with more memory"


def as_json(found: Plan) -> dict[str, Any]:
    """Return the plan for JSON, in bytes and seconds; `settings` has the memory with each useful kind of recompute."""
    job, machine, time = found.job, found.machine, asdict(found.time)
    made = communicators(job, found.ranks.index(found.fullest), machine.nccl_channels)
    settings = {
        f"{one.recompute}{', Pa' * one.partition}{'+cpu' * (one.offload == 'cpu')}": _ranks(one, machine, found.system)
        for each in next(savings(replace(job, recompute="none", partition=False, offload="none")))
        if each.loss_chunk == 0
        for one in [replace(each, loss_chunk=job.loss_chunk)]
    }
    each = [found.system.sent(job, traffic(job, rank)) for rank in range(job.pipeline)]
    sent = max(each, key=lambda sent: sum(sum(purposes.values()) for purposes in sent.values()))  # of one rank
    hours = found.tokens / (found.time.tokens_per_second_per_device * job.ranks) / 3600
    return {
        "parameters": parameters(job.shape),
        "machine": machine.name,
        "system": found.system.name,
        **({"stage": found.stage} if found.stage else {}),
        "gpus": job.ranks,
        "memory": _memory(found.fullest)
        | {
            "available_bytes": int(usable(machine)),
            "headroom_bytes": int(usable(machine)) - found.fullest.peak,
            "logits_bytes": logits(job),
            "cache_bytes": cache_bytes(job.shape, job.tensor, 1, job.shape.seq_len, job.bytes.parameter),
            "communicators": [asdict(one) for one in made],
            "ranks": [_memory(rank) for rank in found.ranks],
            "settings": {words: _memory(fullest(ranks)) for words, ranks in settings.items()},
        },
        "traffic": sent,
        "traffic_by_node": split_by_node(job, sent, machine.devices_per_node),
        "bubble": time.pop("bubble"),
        "time": time,
        "fits": found.fits,
        "uncertainty": {"time": TIME_ERROR, "meaning": UNCERTAINTY},
        "checkpoint": asdict(found.checkpoint),
        "budget": {
            "tokens": found.tokens,
            "steps": found.steps,
            "hours": hours,
            "days": hours / 24,
            "dollars": None if machine.price_per_hour is None else hours * job.ranks * machine.price_per_hour,
        },
    }


def search_as_json(found: Search, machine: Machine) -> dict[str, Any]:
    """Return {tried: number of layouts, best: layouts with their options and a reason for their place} for JSON."""
    return {"tried": found.tried, "best": [_row(one, machine) for one in found.best]}


def _ranks(job: Job, machine: Machine, system: System) -> list[RankMemory]:
    """Return the memory of every rank of a pipeline."""
    return [planned(job, rank, machine, system.memory(job, rank)) for rank in range(job.pipeline)]


def _memory(rank: RankMemory) -> dict[str, Any]:
    held = rank.held
    return {
        "parameters_bytes": held.get("parameters", 0),
        "gradients_bytes": held.get("gradients", 0),
        "optimizer_bytes": held.get("optimizer", 0),
        "activations_bytes": sum(held.get(name, 0) for name in ACTIVATIONS),
        "buffers_bytes": sum(held.get(name, 0) for name in BUFFERS),
        "peak_bytes": rank.peak,
        "host_bytes": rank.host,
        "disk_bytes": rank.disk,
        "cause": rank.cause,
        "categories": held,
    }


def _row(found: Found, machine: Machine) -> dict[str, Any]:
    time, memory = found.time, found.fullest
    parts = sorted(time.parts.items(), key=lambda pair: -pair[1])
    lost = [f"{name} {part / time.step_s:.0%}" for name, part in parts if name != "compute" and part > 0][:2]
    waits = f"; waits for {', '.join(lost)}" if lost else ""
    return {
        "options": options_of(found.job),
        "data": found.job.data,
        "step_s": time.step_s,
        "tflops_per_device": time.tflops_per_device,
        "mfu": time.mfu,
        "peak_bytes": memory.peak,
        "host_bytes": memory.host,
        "disk_bytes": memory.disk,
        "why": f"{(usable(machine) - memory.peak) / 1e9:.1f} GB free{waits}",
    }


def _check_peak(config: Config, machine: Machine) -> None:
    dtype = config.precision.dtype
    if dtype not in machine.peak_flops:
        what = f"{machine.name} has no peak for matrix products in {dtype}; known are {', '.join(machine.peak_flops)}"
        raise UserError(118, what, "use another precision.dtype", where="plan")
    if config.uses_disks and not machine.disk_bytes:
        do = "give `disk: {bytes, read, write}` in a machine's file"
        raise UserError(118, f"the disks of {machine.name} are not known", do, where="plan")
