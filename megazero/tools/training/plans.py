"""Plan the parts of a run for its ranks: memory, traffic, and the memory that options would save."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

from megazero.builders.job import job_of
from megazero.config.schema import Config
from megazero.launcher.world import World
from megazero.plan.job import Job
from megazero.plan.memory import DISK, HOST, memory
from megazero.plan.placements import stages_that_shard
from megazero.plan.traffic import traffic
from megazero.run.planned import Planned, Planner


def planner(world: World) -> Planner:
    """Return the planner of a run whose ranks all compute on one kind of device."""

    def plan(config: Config, rank: int, fused: bool) -> Planned:
        job = job_of(config, world.size, apart=world.device.type != "cpu")
        found = [memory(job, each, fused=fused) for each in range(job.pipeline)]
        ranks = [{"memory": asdict(one), "traffic": traffic(job, each)} for each, one in enumerate(found)]
        held = {name: size for name, size in found[rank].held.items() if not name.startswith((HOST, DISK))}
        return Planned(f"{json.dumps({'pipeline_ranks': ranks}, indent=1)}\n", held, lambda: _savings(job, rank))

    return plan


def _savings(job: Job, rank: int) -> dict[str, int]:
    """Return the bytes that a rank would save by each option that the job leaves unused."""
    now = memory(job, rank).peak
    return {option: less for option, changed in _changes(job) if (less := now - memory(changed, rank).peak) > 0}


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    if job.recompute != "full":
        yield "memory.recompute=full", replace(job, recompute="full")
    elif not job.partition and not job.sequence and job.tensor > 1:
        yield "memory.partition=true", replace(job, partition=True)
    if job.tensor > 1 and not job.sequence and job.shape.seq_len % job.tensor == 0:
        yield "parallel.sequence=true", replace(job, sequence=True)
    if job.data > 1 and not job.shards_parameters:
        stage = min(stages_that_shard("parameters"))
        yield f"zero.stage={stage}", replace(job, stage=stage)
    if job.replicas > 1:
        yield "zero.shard_ranks=null", replace(job, shard_ranks=None)
    if job.apart and job.shards_optimizer and not job.optimizer_away:
        yield "zero.offload.optimizer=cpu", replace(job, offload_optimizer="cpu")
    if job.micro_batch > 1 and job.micro_batch % 2 == 0:
        half = job.micro_batch // 2
        yield f"batch.micro={half}", replace(job, micro_batch=half)
