"""Convert a config to a job of the planner, and a job back to options of a config."""

from __future__ import annotations  # no import of the config package: its types are only named here

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megazero.builders.pipeline import model_shape
from megazero.optim.groups import Asked, Groups
from megazero.plan.job import Bytes, Job

if TYPE_CHECKING:
    from megazero.config.schema import Config, Optimizer

OPTIONS = {  # field of a job: the config option with its value
    **{name: f"parallel.{name}" for name in ("tensor", "pipeline", "sequence", "tensor_chunks")},
    "loss_chunk": "model.loss_chunk",
    **{name: f"pipeline.{name}" for name in ("schedule", "chunks")},
    **{name: f"zero.{name}" for name in ("stage", "shard_ranks", "secondary_ranks")},
    "micro_batch": "batch.micro",
    **{name: f"memory.{name}" for name in ("recompute", "partition", "offload", "cuda_graphs")},
    **{f"offload_{name}": f"zero.offload.{name}" for name in ("optimizer", "parameters")},
    "delayed": "zero.offload.delayed",
    **{f"quantize_{name}": f"zero.quantize.{name}" for name in ("parameters", "gradients")},
    "error_feedback": "zero.quantize.error_feedback",
    "muon_steps": "optimizer.muon.steps",
}
PATH = "/local/nvme"  # placeholder: a job does not know the folder on the local disk


def job_of(config: Config, ranks: int, *, apart: bool = True) -> Job:
    """Return the job of a config on `ranks` ranks.

    Args:
        apart: host and device memory are separate; if False, offload to the host and CUDA graphs have no effect.
    """
    item = {"fp64": 8, "fp32": 4}.get(config.precision.dtype, 2)
    gradient = 4 if config.zero.grad_dtype == "fp32" and item < 4 else item
    reduced = {"bf16": 2, "fp32": 4, "param": item}.get(config.zero.reduce_dtype or "", gradient)
    master = item if config.precision.masters == "none" else max(item, 4)
    moment = 2 if config.optimizer.moments == "bf16" and item < 8 else max(item, 4)
    groups = groups_of(config.optimizer)
    fields = {field: attrgetter(option)(config) for field, option in OPTIONS.items()}
    fields |= {"micro_batch": config.batch.rows, "loss_chunk": config.model.loss_chunk or 0}
    if not apart:
        homes = ("offload", "offload_optimizer", "offload_parameters")
        fields |= {field: "none" for field in homes if fields[field] == "cpu"} | {"cuda_graphs": False}
        fields["delayed"] = False
    return Job(
        model_shape(config),
        Bytes(item, gradient, master, reduced, config.precision.dtype == "bf16", moment),
        data=ranks // (config.parallel.tensor * config.parallel.pipeline),
        global_batch=config.batch.global_,
        apart=apart,
        mask_eod=config.data.mask_eod,
        optimizers=groups.optimizers,
        norms=1 + len(groups.clips),
        **fields,
    )


def groups_of(o: Optimizer) -> Groups:
    """Return the update rules of parameters."""
    asked = [Asked(*(getattr(own, field) for field in Asked._fields)) for own in o.groups or ()]
    return Groups(o.name, o.weight_decay, asked, o.muon.lr_factor, o.average.kind != "none")


def options_of(job: Job) -> dict[str, Any]:
    """Return the config options of a job: all but model, precision, global batch and data axis."""
    where = {"zero.offload.path": PATH} if job.uses_disks else {}
    return where | {option: getattr(job, field) for field, option in OPTIONS.items()}


def laid_out(config: Config, job: Job) -> Config:
    """Return a copy of a resolved config with the options of a job of its model (`options_of`), unchecked."""
    return changed(config, options_of(job))


def changed(section: Any, options: Mapping[str, Any]) -> Any:
    """Return a copy of a config or of a section with some dotted options changed, unchecked."""
    for option, value in options.items():
        name, _, inside = option.partition(".")
        new = changed(getattr(section, name), {inside: value}) if inside else value
        section = section.model_copy(update={name: new})
    return section
