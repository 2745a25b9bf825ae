"""Turn a config into a job, and a job into options of a config: the only place that does."""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megazero.builders.pipeline import model_shape
from megazero.plan.job import Job
from megazero.plan.states import Bytes

if TYPE_CHECKING:
    from megazero.config.schema import Config

OPTIONS = {  # of a config, by the field of a job that has their value
    "tensor": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "sequence": "parallel.sequence",
    "tensor_chunks": "parallel.tensor_chunks",
    "schedule": "pipeline.schedule",
    "chunks": "pipeline.chunks",
    "stage": "zero.stage",
    "shard_ranks": "zero.shard_ranks",
    "secondary_ranks": "zero.secondary_ranks",
    "micro_batch": "batch.micro",
    "recompute": "memory.recompute",
    "partition": "memory.partition",
    "offload": "memory.offload",
    "cuda_graphs": "memory.cuda_graphs",
    "offload_optimizer": "zero.offload.optimizer",
    "offload_parameters": "zero.offload.parameters",
    "delayed": "zero.offload.delayed",
    "quantize_parameters": "zero.quantize.parameters",
    "quantize_gradients": "zero.quantize.gradients",
    "error_feedback": "zero.quantize.error_feedback",
}
PATH = "/local/nvme"  # stands for a folder on a local disk, which a job does not know


def job_of(config: Config, ranks: int, *, apart: bool = True) -> Job:
    """Return a config's job on some ranks.

    Args:
        apart: the host's memory is not the device's; where it is, offload to the host and CUDA graphs change nothing.
    """
    item = {"fp64": 8, "fp32": 4}.get(config.precision.dtype, 2)
    gradient = 4 if config.zero.grad_dtype == "fp32" and item < 4 else item
    reduced = {"bf16": 2, "fp32": 4, "param": item}.get(config.zero.reduce_dtype or "", gradient)
    fields = {field: attrgetter(option)(config) for field, option in OPTIONS.items()}
    fields["micro_batch"] = config.batch.rows
    if not apart:
        homes = ("offload", "offload_optimizer", "offload_parameters")
        fields |= {field: "none" for field in homes if fields[field] == "cpu"} | {"cuda_graphs": False}
        fields["delayed"] = False
    return Job(
        model_shape(config),
        Bytes(item, gradient, max(item, 4), reduced),
        data=ranks // (config.parallel.tensor * config.parallel.pipeline),
        global_batch=config.batch.global_,
        apart=apart,
        mask_eod=config.data.mask_eod,
        **fields,
    )


def options_of(job: Job) -> dict[str, Any]:
    """Return the options that lay a config out as a job is: all but model, precision, global batch and data axis."""
    where = {"zero.offload.path": PATH} if job.uses_disks else {}
    return where | {option: getattr(job, field) for field, option in OPTIONS.items()}


def laid_out(config: Config, job: Job) -> Config:
    """Return a resolved config with the options of a job of its model; nothing is checked."""
    return changed(config, options_of(job))


def changed(section: Any, options: Mapping[str, Any]) -> Any:
    """Return a config, or a section of one, with other values of some dotted options; nothing is checked."""
    own = {name: value for name, value in options.items() if "." not in name}
    for inner in dict.fromkeys(name.partition(".")[0] for name in options if "." in name):
        below = {
            name.removeprefix(f"{inner}."): value for name, value in options.items() if name.startswith(f"{inner}.")
        }
        own[inner] = changed(getattr(section, inner), below)
    return section.model_copy(update=own)
