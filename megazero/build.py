"""From a config to built objects: config -> grid -> model -> units -> trainer.

With config.py this is the only file that sees the config. Every piece below receives the plain values it uses, so the
order of construction can be read here from top to bottom.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megazero.checkpoint.weights import gather_weights, save_weights
from megazero.config import Config, Optimizer
from megazero.config_file import flatten
from megazero.data.loader import BatchLoader, MicroBatch, WindowDataset, open_datasets, validation_batches
from megazero.data.tokenizer import Tokenizer
from megazero.errors import UserError
from megazero.kernels.choice import choose
from megazero.kernels.operations import REFERENCE, Operations
from megazero.learning_rate import LearningRate
from megazero.model.parameter import declaration_of
from megazero.model.step import Step
from megazero.model.transformer import Shape, Transformer
from megazero.observe.console import ConsoleSink
from megazero.observe.jsonl import JsonlSink
from megazero.observe.profile import Profile
from megazero.observe.recorder import Recorder, Work
from megazero.observe.sinks import Sink, Sinks
from megazero.observe.tensorboard_sink import TensorboardSink
from megazero.observe.wandb_sink import WandbSink
from megazero.parallel.agreement import FailedElsewhere, agree
from megazero.parallel.collectives import gather_bytes
from megazero.parallel.grid import Axis, Grid, data_size
from megazero.parallel.pool import Pool
from megazero.plan.hardware import peak_flops
from megazero.plan.model import ModelShape
from megazero.run_folder import RunFolder
from megazero.trainer import Pace, Trainer
from megazero.validation import Validation
from megazero.zero.engine import Engine
from megazero.zero.layout import Entry, lay_out
from megazero.zero.optimizer import AdamW
from megazero.zero.placement import STAGES, Precision, Spread
from megazero.zero.unit import Unit

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
_PROFILED_STEPS = 3


def model_shape(config: Config) -> ModelShape:
    """The model as the closed formulas of plan/ see it: parameters, FLOPs."""
    m = config.model
    assert m.kv_heads is not None and m.ffn is not None, "a resolved config"
    return ModelShape(
        layers=m.layers,
        hidden=m.hidden,
        heads=m.heads,
        kv_heads=m.kv_heads,
        ffn=m.ffn,
        vocab=m.vocab,
        seq_len=m.seq_len,
        learned_positions=m.position == "learned",
        layernorm=m.norm == "layernorm",
        gated=m.activation == "swiglu",
        tied=m.tie_embeddings,
    )


def check_world(config: Config, size: int) -> None:
    """Holds the config against the number of ranks, before any of them meets another.

    Raises:
        UserError: 106, the sizes do not fit.
    """
    data = data_size(size, config.parallel.tensor, config.parallel.pipeline)
    if config.batch.global_ % (config.batch.micro * data):
        equation = "batch.global % (batch.micro * data ranks) == 0"
        rest = config.batch.global_ % (config.batch.micro * data)
        got = f"{config.batch.global_} % ({config.batch.micro} * {data}) = {rest}"
        raise UserError(106, f"expected {equation}, got {got}", "change batch.global or batch.micro")


def build_model(config: Config, ops: Operations = REFERENCE, tensor: Axis | None = None) -> Transformer:
    """The model on the meta device: no memory, any size. Without `tensor` every matrix is whole."""
    return Transformer(
        Shape(**config.model.model_dump()),
        seed=config.run.seed,
        tensor=tensor or Axis("tensor"),
        sequence=config.parallel.sequence,
        ops=ops,
    )


def bucket_of(config: Config) -> int:
    """Bytes of a communication that may be under way."""
    return int(config.zero.bucket_mb * 2**20)


def precision_of(config: Config) -> Precision:
    dtype = DTYPES[config.precision.dtype]
    wide = config.zero.grad_dtype == "fp32" and dtype != torch.float64
    return Precision(dtype, torch.float32 if wide else dtype)


def build_units(
    model: Transformer, *, seed: int, spread: Spread, precision: Precision, device: torch.device
) -> list[Unit]:
    """Gives each unit of the model memory for what of it rests on this rank, and initial values.

    Nothing else is ever allocated: no rank holds a whole unit that it will not keep.
    """
    ledger = spread.data.wire.ledger
    whole, partial = (Pool(dtype, device, ledger, "pool") for dtype in (precision.parameters, precision.gradients))
    units = []
    for name, members in model.units():
        declarations = {parameter_name: declaration_of(parameter) for parameter_name, parameter in members}
        entries = [Entry(n, d.local_shape, d.decay, d.split) for n, d in declarations.items()]
        unit = Unit(lay_out(name, entries), spread, precision, device, (whole, partial))
        unit.fill(lambda n, start, stop, of=declarations: of[n].initial(seed, n, start, stop))
        unit.adopt(dict(members))
        units.append(unit)
    return units


def build_engine(
    model: Transformer,
    *,
    seed: int,
    spread: Spread,
    precision: Precision,
    device: torch.device,
    optimizer: Optimizer,
    tokens_per_step: int,
    ops: Operations,
) -> Engine:
    """Units, optimizer state, and the events of a step around the model's parts."""
    units = build_units(model, seed=seed, spread=spread, precision=precision, device=device)
    o, wire = optimizer, spread.data.wire
    adam = AdamW(units, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, bucket=wire.bucket)
    wire.ledger.hold("optimizer", adam.nbytes)
    wire.ledger.hold("staging", adam.staging_bytes)
    scaling = precision.parameters == torch.float16
    engine = Engine(units, adam, clip=o.clip, tokens_per_step=tokens_per_step, spread=spread, scaling=scaling, ops=ops)
    model.path = engine.watch(model.path, model.units_on_path())
    return engine


def engine_of(config: Config, model: Transformer, grid: Grid, device: torch.device, ops: Operations) -> Engine:
    """The engine that a config asks for, on one rank of a grid."""
    return build_engine(
        model,
        seed=config.run.seed,
        spread=spread_of(config, grid),
        precision=precision_of(config),
        device=device,
        optimizer=config.optimizer,
        tokens_per_step=config.batch.global_ * config.model.seq_len,
        ops=ops,
    )


def model_losses(model: Transformer, device: torch.device, sequence: bool) -> Callable[[MicroBatch, int, bool], Tensor]:
    """(micro-batch, step, training) -> token losses [S, B] of the whole model, the same on every tensor rank."""
    part = model.shape.seq_len // model.tensor.size if sequence else 0

    def losses(batch: MicroBatch, step: int, training: bool) -> Tensor:
        tokens, targets, valid = (t.to(device) for t in (batch.tokens_SB, batch.targets_SB, batch.valid_SB))
        now = Step(step, batch.sample_ids_B.to(device), model.tensor.rank * part, training=training)
        if batch.positions_SB is not None and batch.documents_SB is not None:
            now = now.within_documents(batch.positions_SB.to(device), batch.documents_SB.to(device))
        return model.losses(tokens, targets, valid, now)

    return losses


def build_trainer(config: Config, grid: Grid, device: torch.device, folder: RunFolder) -> Trainer:
    """Everything that one rank of a training run needs, in the order in which it depends on each other.

    Only the first rank of the world writes: rows, profiles, weights. It asks nothing of the other ranks, so each may
    fail on its own; whoever calls it lets them agree.

    Raises:
        UserError: 2xx, the data is missing, damaged or too small; 112, a tokenizer that is not the model's;
            114, fused kernels that cannot be had; 160 and 161, a package that is not installed.
    """
    dtype = DTYPES[config.precision.dtype]
    name = config.data.tokenizer
    tokenizer = None if name is None else open_tokenizer(name, config.model.vocab)
    train, valid = open_datasets(
        config.data.train, config.data.valid, config.model.seq_len, config.model.vocab, config.data.mask_eod
    )
    ops = choose(config.precision.kernels, device, dtype)
    model = build_model(config, ops, grid.tensor)
    engine = engine_of(config, model, grid, device, ops)
    losses = model_losses(model, device, config.parallel.sequence)
    flops = model_shape(config).flops_per_token()
    work = Work(engine.tokens_per_step, flops, _peak_flops(config, device), device, grid.world.size)
    first = grid.world.rank == 0
    wire = grid.world.wire
    return Trainer(
        engine,
        lambda batch, step: losses(batch, step, True),
        BatchLoader(
            train,
            seed=config.run.seed,
            global_batch=config.batch.global_,
            micro_batch=config.batch.micro,
            data_rank=grid.data.rank,
            num_data=grid.data.size,
        ),
        _validation(config, valid, lambda batch: losses(batch, 0, False), tokenizer, grid.data, device),
        Recorder(_sinks(config, folder, first), _profile(config, folder, first), work, wire.ledger),
        Pace(config.run.steps, _learning_rate(config), config.observe.every, config.data.valid_every),
        lambda: _save(model, engine, grid, device, folder, config.run.steps),
        wire.seat.now,
        lambda own, say: _blame(own, say, grid, device),
    )


def spread_of(config: Config, grid: Grid) -> Spread:
    assert config.zero.stage is not None, "a resolved config"
    return Spread(grid.data, grid.tensor, config.parallel.sequence, STAGES[config.zero.stage])


def _save(model: Transformer, engine: Engine, grid: Grid, device: torch.device, folder: RunFolder, steps: int) -> None:
    """The whole weights, written by the first rank; all know how it went."""
    write = grid.world.rank == 0
    declarations = {name: declaration_of(parameter) for name, parameter in model.named_parameters()}
    rows = {name: d.shape[0] if d.split else None for name, d in declarations.items()}
    parts = ((name, part, rows[name]) for name, part in engine.named_parameters())
    whole = gather_weights(parts, grid.tensor, keep=write)
    agree(grid.world, device, lambda: save_weights(folder.checkpoint(steps), whole, steps) if write else None)


def _blame(own: str | None, say: Callable[[int, str | None], UserError], grid: Grid, device: torch.device) -> UserError:
    """The error of the first rank that has found something in its own part of a step; of rank 0 if none has."""
    found = gather_bytes((own or "").encode(), grid.world, "agree", device)
    rank = next((rank for rank, text in enumerate(found) if text), 0)
    return say(rank, own) if rank == grid.world.rank else FailedElsewhere(rank, 301)


def _peak_flops(config: Config, device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device), config.precision.dtype) if device.type == "cuda" else None


def open_tokenizer(path: str, vocab: int) -> Tokenizer:
    """The tokenizer of a model of `vocab` ids.

    Raises:
        UserError: 112, it has more pieces than that; 209, it cannot be read.
    """
    tokenizer = Tokenizer(path)
    if tokenizer.vocab_size > vocab:
        what = f"the tokenizer has {tokenizer.vocab_size} pieces, model.vocab is {vocab}"
        raise UserError(112, what, "raise model.vocab or give the model's tokenizer", where=path)
    return tokenizer


def _learning_rate(config: Config) -> LearningRate:
    s = config.schedule
    assert s.cooldown is not None, "a resolved config"
    return LearningRate(config.optimizer.lr, s.min_lr, s.warmup, config.run.steps, s.decay, s.cooldown)


def _validation(
    config: Config,
    dataset: WindowDataset | None,
    losses: Callable[[MicroBatch], Tensor],
    tokenizer: Tokenizer | None,
    data: Axis,
    device: torch.device,
) -> Validation | None:
    if dataset is None:
        return None
    micro, samples = config.batch.micro, config.data.valid_samples
    token_bytes = None if tokenizer is None else tokenizer.token_bytes()

    def batches() -> Iterator[MicroBatch]:
        return validation_batches(dataset, micro, samples, data_rank=data.rank, num_data=data.size)

    validation = Validation(batches, losses, token_bytes, data, device)
    validation.check(str(dataset.stream.dataset.bin_path))
    return validation


def _sinks(config: Config, folder: RunFolder, first: bool) -> Sinks:
    if not first:
        return Sinks([])
    sinks: list[Sink] = [JsonlSink(folder.metrics), ConsoleSink(config.run.steps, sys.stdout)]
    if config.observe.tensorboard:
        sinks.append(TensorboardSink(folder.path / "tensorboard"))
    if config.observe.wandb is not None:
        sinks.append(WandbSink(config.observe.wandb, folder.path.name, flatten(config), folder.path))
    return Sinks(sinks)


def _profile(config: Config, folder: RunFolder, first: bool) -> Profile:
    if config.observe.profile is None or not first:
        return Profile(1, 0, folder.profile)
    folder.profile.mkdir(exist_ok=True)
    return Profile(config.observe.profile, _PROFILED_STEPS, folder.profile)
