"""Turn a config into a job, and a job into options of a config: the only place that does."""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megazero.build.pipeline import model_shape
from megazero.plan.job import Job
from megazero.plan.states import Bytes

if TYPE_CHECKING:
    from megazero.config.schema import Config

# Of the codes of what is quantised, by the word of a config.
BITS = {"none": None, "int8": 8, "int4": 4}
_NAMES = {bits: name for name, bits in BITS.items()}
PATH = "/local/nvme"  # stands for a folder on a local disk, which a job does not know


def job_of(config: Config, ranks: int, *, apart: bool = True) -> Job:
    """Return a config's job on some ranks.

    Args:
        apart: the host's memory is not the device's; where it is, offload changes nothing.
    """
    parallel, memory, offload = config.parallel, config.memory, config.zero.offload
    item = {"fp64": 8, "fp32": 4}.get(config.precision.dtype, 2)
    gradient = 4 if config.zero.grad_dtype == "fp32" and item < 4 else item
    reduced = {"bf16": 2, "fp32": 4, "param": item}.get(config.zero.reduce_dtype or "", gradient)
    assert config.zero.stage is not None and config.pipeline.chunks is not None, "a resolved config"
    return Job(
        model_shape(config),
        Bytes(item, gradient, max(item, 4), reduced),
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=ranks // (parallel.tensor * parallel.pipeline),
        sequence=parallel.sequence,
        tensor_chunks=parallel.tensor_chunks,
        schedule=config.pipeline.schedule,
        chunks=config.pipeline.chunks,
        stage=config.zero.stage,
        shard_ranks=config.zero.shard_ranks,
        secondary_ranks=config.zero.secondary_ranks,
        micro_batch=config.batch.rows,
        global_batch=config.batch.global_,
        recompute=memory.recompute,
        partition=memory.partition,
        offload=memory.offload == "cpu" and apart,
        disk_inputs=memory.offload == "nvme",
        graphs=memory.cuda_graphs and apart,
        offload_optimizer=offload.optimizer == "cpu" and apart,
        offload_parameters=offload.parameters == "cpu" and apart,
        disk_optimizer=offload.optimizer == "nvme",
        disk_parameters=offload.parameters == "nvme",
        parameter_bits=BITS[config.zero.quantize.parameters],
        gradient_bits=BITS[config.zero.quantize.gradients],
        error_feedback=config.zero.quantize.error_feedback,
        apart=apart,
        delayed=offload.delayed and apart,
        dropout=config.model.dropout > 0,
        documents=config.data.mask_eod,
    )


def options_of(job: Job) -> dict[str, Any]:
    """Return the options that lay a config out as a job is: all but model, precision, global batch and data axis."""
    where = {"zero.offload.path": PATH} if job.uses_disks else {}
    return where | {
        "parallel.tensor": job.tensor,
        "parallel.pipeline": job.pipeline,
        "parallel.sequence": job.sequence,
        "parallel.tensor_chunks": job.tensor_chunks,
        "pipeline.schedule": job.schedule,
        "pipeline.chunks": job.chunks,
        "zero.stage": job.stage,
        "zero.shard_ranks": job.shard_ranks,
        "zero.secondary_ranks": job.secondary_ranks,
        "batch.micro": job.micro_batch,
        "memory.recompute": job.recompute,
        "memory.partition": job.partition,
        "memory.offload": "nvme" if job.disk_inputs else "cpu" if job.offload else "none",
        "memory.cuda_graphs": job.graphs,
        "zero.offload.optimizer": "nvme" if job.disk_optimizer else "cpu" if job.offload_optimizer else "none",
        "zero.offload.parameters": "nvme" if job.disk_parameters else "cpu" if job.offload_parameters else "none",
        "zero.offload.delayed": job.delayed,
        "zero.quantize.parameters": _NAMES[job.parameter_bits],
        "zero.quantize.gradients": _NAMES[job.gradient_bits],
        "zero.quantize.error_feedback": job.error_feedback,
    }


def laid_out(config: Config, job: Job) -> Config:
    """Return a resolved config with the options of a job of its model; nothing is checked."""
    return _changed(config, options_of(job))


def _changed(section: Any, options: Mapping[str, Any]) -> Any:
    """Return a section with other values of some dotted options."""
    own = {name: value for name, value in options.items() if "." not in name}
    for inner in dict.fromkeys(name.partition(".")[0] for name in options if "." in name):
        below = {
            name.removeprefix(f"{inner}."): value for name, value in options.items() if name.startswith(f"{inner}.")
        }
        own[inner] = _changed(getattr(section, inner), below)
    return section.model_copy(update=own)
