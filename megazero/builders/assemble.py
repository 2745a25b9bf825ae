"""Build what computes a step on one rank from a config: config -> grid -> model -> units -> stages.

Every piece below this room receives the plain values it uses, so the order of construction can be read here from top
to bottom.
"""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.builders.job import job_of
from megazero.builders.pipeline import layers_of, model_shape
from megazero.builders.recompute import recompute
from megazero.builders.units import axes_of, build_units, offload_of, resources_of
from megazero.builders.upload import Upload
from megazero.comm.context import CommContext
from megazero.comm.grid import Axis, Grid, make_grid, single
from megazero.comm.home import Home
from megazero.comm.host import Host
from megazero.extensions.registry import extensions_of
from megazero.kernels.operations import REFERENCE, Operations
from megazero.model.batch_context import BatchContext
from megazero.model.contract import Layer, Model
from megazero.model.transformer import Transformer
from megazero.optim.adamw import AdamW
from megazero.pipeline.executor import Pipeline
from megazero.pipeline.stage import Stage
from megazero.pipeline.transport import Transport
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
    """The inputs of the stages of a model for one micro-batch."""

    tokens_SB: Tensor
    targets_SB: Tensor
    valid_SB: Tensor
    now: BatchContext


DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def grid_of(config: Config, comm: CommContext, world: World) -> Grid:
    """Make the grid of this rank; every rank calls it, once it has met the others."""
    if world.size == 1:
        return single(comm)
    # What talks through the host's memory has groups for tensors of the host, whatever computes.
    parallel, device_type = config.parallel, "cuda" if comm.backend == "nccl" else "cpu"
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "shard_ranks": neighbours_of(config)}
    return make_grid(comm=comm, device_type=device_type, tied=job_of(config, world.size).ties_ranks, **sizes)


def neighbours_of(config: Config) -> int | None:
    """Return how many neighbouring data ranks are an axis of their own, for shards or second shards; None: all are."""
    return config.zero.shard_ranks or config.zero.secondary_ranks


def build_model(config: Config, ops: Operations = REFERENCE, tensor: Axis | None = None) -> Transformer:
    """Build the model on the meta device: no memory, any size. Without `tensor` every matrix is whole."""
    return Transformer(
        model_shape(config),
        seed=config.run.seed,
        tensor=tensor or Axis("tensor"),
        sequence=config.parallel.sequence,
        ops=ops,
        chunks=config.parallel.tensor_chunks,
    )


def bucket_of(config: Config) -> int:
    """Return the bytes of a communication that may be under way."""
    return int(config.zero.bucket_mb * 2**20)


def precision_of(config: Config) -> Precision:
    """Return the dtypes of parameters, gradients and their sums over ranks."""
    dtype = DTYPES[config.precision.dtype]
    wide = config.zero.grad_dtype == "fp32" and dtype != torch.float64
    asked = config.zero.reduce_dtype
    reduced = None if asked is None else dtype if asked == "param" else DTYPES[asked]
    return Precision(dtype, torch.float32 if wide else dtype, reduced)


def build_engine(
    model: Model,
    stages: Sequence[range],
    *,
    seed: int | None,
    axes: Callable[[str], UnitAxes],
    grid: Grid,
    resources: Resources,
    optimizer: Optimizer,
    tokens_per_step: int,
    update_ops: Operations,
    recomputed: Container[Layer] = (),
) -> Engine:
    """Build units, optimizer state, and the events of a step around the layers that this rank has.

    Args:
        stages: of each of this rank's stages the parts of the model's path, in forward order.
        seed: of the initial values; None: anything.
        resources: of all units.
        update_ops: the kernels to use where the update is, which may be the host.
        recomputed: layers that run again in their backward.
    """
    on_path = model.units_of_layers()
    used = [list(dict.fromkeys(name for i in parts for name in on_path[i])) for parts in stages]
    names = {name for of_stage in used for name in of_stage}
    units = build_units(model, names, seed=seed, axes=axes, resources=resources)
    o, bucket = optimizer, grid.comm.bucket
    adam = AdamW(units, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, bucket=bucket, ops=update_ops)
    engine = Engine(
        used,
        units,
        [name for name, _ in model.units()],
        adam,
        clip=o.clip,
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
    """The parts that compute a step on one rank: the engine's update around the pipeline's passes."""

    model: Transformer
    engine: Engine
    pipeline: Pipeline
    layers: Layers


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
) -> Built:
    """Build the model that a config asks for, as one rank of a grid has it.

    Args:
        host: where what is offloaded goes; None: the memory of this machine.
        host_ops: the kernels of an update on the host; None: those of the device, which is the host.
        homes: more homes of offloaded values, by the words of the config that ask for them.
        filled: with the initial values of `run.seed`; False: with anything that memory holds.
    """
    host, homes = host or Host(device, grid.comm.ledger), homes or {}
    layers, precision, job = layers_of(config), precision_of(config), job_of(config, grid["world"].size)
    stages = layers.of_rank(grid["pipeline"].rank)
    model = build_model(config, ops, grid["tensor"])
    offload = offload_of(config, host, homes)
    recomputed = recompute(job, model, layers, stages, grid, precision.parameters, device, host, homes)
    extensions = extensions_of(config, grid, ops, precision, device)
    engine = build_engine(
        model,
        list(stages.values()),
        seed=config.run.seed if filled else None,
        axes=axes_of(config, grid),
        grid=grid,
        resources=resources_of(precision, device, grid.comm.ledger, offload=offload, ops=ops, extensions=extensions),
        optimizer=config.optimizer,
        tokens_per_step=config.batch.global_ * config.model.seq_len,
        update_ops=ops if offload.optimizer is None else host_ops or ops,
        recomputed=recomputed,
    )
    if model.rotary is not None:
        grid.comm.ledger.hold("angles", model.rotary.table_bytes(precision.parameters))
    local = job.local(config.model.seq_len)
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
        lambda batch: (local, batch.tokens_SB.shape[1], config.model.hidden),
        engine.reduce_tied,
    )
    return Built(model, engine, pipeline, layers)


def _run_of(model: Model, parts: range, last: bool) -> Callable[[Tensor | None, StageInputs], Tensor]:
    """Return what one stage computes: from tokens in the first, token losses [S, B] in the last."""

    def run(x: Tensor | None, feed: StageInputs) -> Tensor:
        y = model.forward_layers(parts, feed.tokens_SB if x is None else x, feed.now)
        return model.score(y, feed.targets_SB, feed.valid_SB) if last else y

    return run


def feeds_of(tensor: Axis, device: torch.device, sequence: bool) -> Callable[[MicroBatch, int, bool], StageInputs]:
    """Return the function (micro-batch, step, training) -> what the stages need to know of it.

    Micro-batches of training come from the loader on the device. Those of a validation are read on the host, which
    scores them too, and are sent one by one.
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
