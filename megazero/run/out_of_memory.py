"""Explain an out-of-memory error in one line: what was asked for, what holds the rest, what would save how much."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from megazero.base.errors import UserError
from megazero.base.terminal import megabytes
from megazero.builders.job import job_of
from megazero.comm.grid import Grid
from megazero.config.schema import Config
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.placements import stages_that_shard

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_WORDS = ("can't allocate memory", "out of memory", "bad_alloc", "can't start new thread")
_SHOWN = 4  # categories


@contextmanager
def explain_out_of_memory(config: Config, grid: Grid, device: torch.device) -> Iterator[None]:
    """Turn errors of device allocations inside into one line that says what takes how much.

    Raises:
        UserError: 330, instead of what the libraries say when there is no memory left.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not _is_it(error):
            raise
        found = _ASKED.search(str(error))
        asked = f" when {megabytes(float(found[1]) * _UNITS[found[2]])} MB more were asked for" if found else ""
        held = {category: held.now for category, held in grid.comm.ledger.bytes.items() if held.now}
        shown = sorted(held.items(), key=lambda pair: -pair[1])[:_SHOWN]
        listed = ", ".join(f"{name} {megabytes(size)}" for name, size in shown)
        what = f"out of memory{asked}; there are {listed} MB"
        spare = sorted(_spare(config, grid, device), reverse=True)
        do = ", ".join(f"{option} spares {megabytes(size)} MB" for size, option in spare[:3]) or "more ranks"
        raise UserError(330, what, do, rank=grid["world"].rank) from None


def _is_it(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(word in str(error) for word in _WORDS)


def _spare(config: Config, grid: Grid, device: torch.device) -> Iterator[tuple[float, str]]:
    """Yield (bytes that this rank's plan would save, option) for each option that the config leaves unused."""
    job, rank = job_of(config, grid["world"].size, apart=device.type != "cpu"), grid["pipeline"].rank
    now = memory(job, rank).peak
    for option, changed in _changes(job, apart=device.type != "cpu"):
        if (less := now - memory(changed, rank).peak) > 0:
            yield less, option


def _changes(job: Job, *, apart: bool) -> Iterator[tuple[str, Job]]:
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
    if apart and job.shards_optimizer and not job.optimizer_away:
        yield "zero.offload.optimizer=cpu", replace(job, offload_optimizer="cpu")
    if job.micro_batch > 1 and job.micro_batch % 2 == 0:
        half = job.micro_batch // 2
        yield f"batch.micro={half}", replace(job, micro_batch=half)
