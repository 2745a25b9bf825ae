"""Build the objects that compute a step on one rank: config -> grid -> model -> units -> stages.

Lower packages receive plain values, never the config, so this file shows the whole order of construction.
"""

from __future__ import annotations  # no import of the config package: its types are only named here

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.builders.job import groups_of, job_of
from megazero.builders.pipeline import layers_of, model_shape
from megazero.builders.recompute import recompute
from megazero.builders.units import axes_of, build_units, offload_of, resources_of
from megazero.builders.upload import Upload
from megazero.comm.context import CommContext
from megazero.comm.grid import Axis, Grid, make_grid, single
from megazero.comm.home import Home
from megazero.comm.host import Host
from megazero.comm.pool import Scratch
from megazero.extensions.registry import extensions_of
from megazero.kernels.operations import REFERENCE, Operations
from megazero.model.batch_context import BatchContext
from megazero.model.contract import Layer, Model
from megazero.model.transformer import Transformer
from megazero.optim.elements import Settings
from megazero.optim.groups import Groups
from megazero.optim.mixture import Mixture
from megazero.pipeline.executor import Pipeline
from megazero.pipeline.stage import Stage
from megazero.pipeline.transport import Transport
from megazero.plan.optimizers import STATES, Optimizers
from megazero.schedules.layers import Layers, lowered
from megazero.zero.engine import Engine
from megazero.zero.placement import Precision, UnitAxes
from megazero.zero.resting import Resources

if TYPE_CHECKING:
    from megazero.config.schema import Config, Optimizer
    from megazero.data.batch import MicroBatch
    from megazero.launcher.world import World


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a model's stages for one micro-batch."""

    tokens_SB: Tensor
    targets_SB: Tensor | None
    valid_SB: Tensor | None
    now: BatchContext


DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def grid_of(config: Config, comm: CommContext, world: World) -> Grid:
    """Build the grid of this rank. Collective: every rank calls it, after the ranks have connected."""
    if world.size == 1:
        return single(comm)
    # A backend that communicates through the host's memory needs groups for CPU tensors, on any device.
    parallel, device_type = config.parallel, "cuda" if comm.backend == "nccl" else "cpu"
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "shard_ranks": neighbours_of(config)}
    return make_grid(comm=comm, device_type=device_type, tied=job_of(config, world.size).ties_ranks, **sizes)


def neighbours_of(config: Config) -> int | None:
    """Return the size of the shard axis: `zero.shard_ranks`, else `zero.secondary_ranks`; None: the data axis' size."""
    return config.zero.shard_ranks or config.zero.secondary_ranks


def build_model(config: Config, ops: Operations = REFERENCE, tensor: Axis | None = None) -> Transformer:
    """Build the model on the meta device, without memory. If `tensor` is None, matrices are not split."""
    return Transformer(
        model_shape(config),
        seed=config.run.seed,
        tensor=tensor or Axis("tensor"),
        sequence=config.parallel.sequence,
        ops=ops,
        chunks=config.parallel.tensor_chunks,
        loss_chunk=config.model.loss_chunk or 0,
    )


def bucket_of(config: Config) -> int:
    """Return the bucket size in bytes: the limit for communication in flight."""
    return int(config.zero.bucket_mb * 2**20)


def precision_of(config: Config) -> Precision:
    """Return the dtypes of parameters, of gradients, and of the reduction of gradients over ranks."""
    dtype = DTYPES[config.precision.dtype]
    wide = config.zero.grad_dtype == "fp32" and dtype != torch.float64
    asked = config.zero.reduce_dtype
    reduced = None if asked is None else dtype if asked == "param" else DTYPES[asked]
    moments = torch.bfloat16 if config.optimizer.moments == "bf16" and dtype != torch.float64 else None
    return Precision(dtype, torch.float32 if wide else dtype, reduced, config.precision.masters != "none", moments)


def settings_of(o: Optimizer) -> Settings:
    """Return the options of the optimizers."""
    muon = o.muon.momentum, o.muon.nesterov, o.muon.steps, o.muon.scale
    return Settings(o.betas, o.eps, *muon, o.clip_value, o.average.decay)


def build_engine(
    model: Model,
    stages: Sequence[range],
    *,
    seed: int | None,
    axes: Callable[[str], UnitAxes],
    grid: Grid,
    resources: Resources,
    groups: Groups,
    settings: Settings,
    clip: float,
    tokens_per_step: int,
    update_ops: Operations,
    recomputed: Container[Layer] = (),
    trains: bool = True,
) -> Engine:
    """Build units and optimizer state, and wrap this rank's layers with the ZeRO events of a step.

    Args:
        stages: for each stage of this rank, its range of layers in `model.layers`, in forward order.
        seed: of the initial values; None: leave the memory uninitialised.
        resources: shared by all units.
        groups, settings: of the optimizers.
        clip: the largest norm of all gradients without a clip of their own; 0: any.
        update_ops: the kernels of the device that runs the update, which may be the host.
        recomputed: layers that run their forward again in backward.
        trains: see `build`.
    """
    on_path = model.units_of_layers()
    used = [list(dict.fromkeys(name for i in parts for name in on_path[i])) for parts in stages]
    names = {name for of_stage in used for name in of_stage}
    units = build_units(model, names, groups, seed=seed, axes=axes, resources=resources, trains=trains)
    how = {"seed": seed or 0, "bucket": grid.comm.bucket, "ops": update_ops, "scratch": Scratch(grid.comm.ledger)}
    engine = Engine(
        used,
        units,
        [name for name, _ in model.units()],
        Mixture(units if trains else [], groups.optimizers, dict.fromkeys(STATES, settings), **how),
        clips=[clip, *groups.clips],
        tokens_per_step=tokens_per_step,
        grid=grid,
        scaling=resources.precision.parameters == torch.float16,
        ops=update_ops,
        offload=resources.offload,
        extensions=resources.extensions,
    )
    for gradients, parts in zip(engine.stages, stages, strict=True):
        last = parts.stop == len(model.layers)
        own = [model.layers[i] for i in parts]
        around = [on_path[i] for i in parts]
        sharded = engine.shard_layers(gradients, own, around, keep_last=last, recomputed=recomputed)
        model.layers[parts.start : parts.stop] = sharded
    return engine


@dataclass(frozen=True)
class Built:
    """The objects that compute a step on one rank: the pipeline runs the passes, the engine the update.

    Attributes:
        optimizers: which optimizer updates which parameter of the whole model.
    """

    model: Transformer
    engine: Engine
    pipeline: Pipeline
    layers: Layers
    optimizers: Optimizers


def build(
    config: Config,
    grid: Grid,
    device: torch.device,
    ops: Operations,
    host: Host | None = None,
    *,
    host_ops: Operations | None = None,
    homes: Mapping[str, Home] | None = None,
    filled: bool = True,
    trains: bool = True,
) -> Built:
    """Build one rank's part of the model, engine and pipeline that a config describes.

    Args:
        host: where values offloaded to the host are kept; None: in this machine's memory.
        host_ops: the kernels of an update on the host; None: `ops` (the device is the host).
        homes: further places for offloaded values (disks), by the config's name for them.
        filled: fill parameters with the initial values of `run.seed`; False: leave them uninitialised.
        trains: allocate gradients and optimizer state; False: the model is only evaluated.
    """
    host, homes = host or Host(device, grid.comm.ledger), homes or {}
    layers, precision, job = layers_of(config), precision_of(config), job_of(config, grid["world"].size)
    stages = layers.of_rank(grid["pipeline"].rank)
    model = build_model(config, ops, grid["tensor"])
    offload = offload_of(config, host, homes)
    groups = groups_of(config.optimizer)
    recomputed = recompute(job, model, layers, stages, grid, precision.parameters, device, host, homes)
    extensions = extensions_of(config, grid, ops, precision, device)
    engine = build_engine(
        model,
        list(stages.values()),
        seed=config.run.seed if filled else None,
        axes=axes_of(config, grid),
        grid=grid,
        resources=resources_of(precision, device, grid.comm.ledger, offload=offload, ops=ops, extensions=extensions),
        groups=groups,
        settings=settings_of(config.optimizer),
        clip=config.optimizer.clip,
        tokens_per_step=config.batch.global_ * config.model.seq_len,
        update_ops=ops if offload.optimizer is None else host_ops or ops,
        recomputed=recomputed,
        trains=trains,
    )
    for rotary in {model.rotaries[i] for parts in stages.values() for i in job.block_indices(parts)}:
        if rotary is not None:
            grid.comm.ledger.hold("angles", rotary.table_bytes(precision.parameters))
    chunks = {}
    for (index, parts), gradients in zip(stages.items(), engine.stages, strict=True):
        last = parts.stop == len(model.layers)
        loss = (lambda losses_SB, feed: engine.loss(losses_SB, feed.valid_SB)) if last else None
        chunks[index] = Stage(index, _run_of(model, parts, last), gradients, loss)
    pipeline = Pipeline(
        chunks,
        len(layers.parts),
        grid["pipeline"].rank,
        lambda m: lowered(layers, m, each=job.shards_gradients, tied=job.shape.tie_embeddings),
        Transport(grid["pipeline"], layers.rank_of, precision.parameters, device),
        lambda batch: (model.own_rows(len(batch.tokens_SB)), batch.tokens_SB.shape[1], config.model.hidden),
        engine.reduce_tied,
    )
    return Built(model, engine, pipeline, layers, groups.optimizers)


def _run_of(model: Model, parts: range, last: bool) -> Callable[[Tensor | None, StageInputs], Tensor]:
    """Return the forward function of a stage: the first takes tokens [S, B], the last returns what the head does."""

    def run(x: Tensor | None, feed: StageInputs) -> Tensor:
        now = feed.now.scored(feed.targets_SB, feed.valid_SB) if last else feed.now
        return model.forward_layers(parts, feed.tokens_SB if x is None else x, now)

    return run


def feeds_of(tensor: Axis, device: torch.device, sequence: bool) -> Callable[[MicroBatch, int, bool], StageInputs]:
    """Return the function (micro-batch, step, training) -> inputs of the stages.

    The loader delivers training micro-batches on the device. Validation micro-batches are on the host, which also
    scores them, and are sent to the device one by one.
    """
    upload = Upload(device)

    def feed(batch: MicroBatch, step: int, training: bool) -> StageInputs:
        if batch.tokens_SB.device.type != device.type:
            (batch,) = upload.pack([batch])()
        part = len(batch.tokens_SB) // tensor.size if sequence else 0
        now = BatchContext(step, batch.sample_ids_B, tensor.rank * part, training=training)
        if batch.positions_SB is not None and batch.documents is not None:
            now = now.within_documents(batch.positions_SB, batch.documents)
        return StageInputs(batch.tokens_SB, batch.targets_SB, batch.valid_SB, now)

    return feed
