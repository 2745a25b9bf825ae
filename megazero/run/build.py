"""Build a part of a run from its config: data, model, engine, trainer, validation, sinks."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megazero.base.doing import ACTIVITIES, doing
from megazero.base.errors import FailedElsewhere, UserError
from megazero.builders.assemble import DTYPES, Built, build, feeds_of, precision_of
from megazero.builders.pipeline import model_shape
from megazero.builders.upload import Upload
from megazero.checkpoint.manifest import Manifest
from megazero.checkpoint.save import ShardState
from megazero.comm.grid import Axis
from megazero.comm.home import PagedHome
from megazero.config.flat import flatten
from megazero.config.schema import Config
from megazero.config.stages import Course, Part
from megazero.data.batch import MicroBatch
from megazero.data.joined import JoinedDataset
from megazero.data.loader import BatchLoader, validation_batches
from megazero.data.origin import Origin, joined, origin_of
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.data.windows import WindowDataset
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose, for_host
from megazero.observe.console import ConsoleSink
from megazero.observe.jsonl import JsonlSink
from megazero.observe.metrics import Work
from megazero.observe.phases import PhaseSeconds
from megazero.observe.profile import Profile
from megazero.observe.recorder import Recorder
from megazero.observe.sinks import Sink, Sinks, warn
from megazero.observe.tensorboard_sink import TensorboardSink
from megazero.observe.wandb_sink import WandbSink
from megazero.optim.learning_rate import LearningRate
from megazero.plan.flops import flops_per_token
from megazero.plan.hardware import peak_flops
from megazero.run.attention import repeat_bits, settle_attention
from megazero.run.checkpointing import about_run, checkpoints_of, holdings_of
from megazero.run.data import RunData, open_data, refuse_overlap, refuse_repeats
from megazero.run.disks import open_disks
from megazero.run.ledger_file import write_ledger
from megazero.run.planned import Planned, compare, fuses
from megazero.run.replicas import Replicas
from megazero.run.resume import Start
from megazero.run.run import Run
from megazero.schedules.check import check
from megazero.train.fault import AFTER_SUMS, Fault
from megazero.train.schedule import TrainSchedule
from megazero.train.spikes import Spikes
from megazero.train.stopping import Stopping
from megazero.train.trainer import Trainer
from megazero.train.validation import Validation

_PROFILED_STEPS = 3


class Ready(NamedTuple):
    """A trainer, the manifest of its checkpoints, tensors to load, the device's kernels, its plan, disks, data."""

    trainer: Trainer
    about: Manifest
    holdings: list[ShardState]
    ops: Operations
    planned: Planned
    disks: PagedHome | None
    data: RunData
    tokenizer: Tokenizer | None

    def close(self) -> None:
        """End background work; values that rest on disks are lost."""
        self.trainer.close()
        if self.disks is not None:
            self.disks.close()


def build_trainer(run: Run, start: Start, part: Part, *, here: int = 1, spent: float = 0.0) -> Ready:
    """Build everything that one rank needs for a part of a run, in the order of dependencies.

    Only the first rank of the world writes rows and profiles. The function does not communicate, so each rank may fail
    on its own; the caller makes the ranks agree.

    Args:
        here: the number of ranks that share this host's memory.
        spent: the seconds that the job has trained before.

    Raises:
        UserError: 2xx, the data is missing, damaged, too small or used too often; 112, a tokenizer that is not the
            model's; 114, fused kernels that are not available; 160 and 161, a package that is not installed.
    """
    config, grid, device, course = part.config, run.grid, run.device, Course(run.config, start.history)
    path = config.data.tokenizer
    tokenizer = None if path is None else open_tokenizer(path, config.model.vocab)
    data = _opened(run, part, course, tokenizer)
    ops, disks, built = _built(run, config, here)
    engine, phases = built.engine, PhaseSeconds()
    planned = run.plan(config, grid["pipeline"].rank, fuses(ops))
    feed = feeds_of(grid["tensor"], device, config.parallel.sequence)

    def now(step: int, phase: str) -> None:
        """Publish to the other ranks what this rank does, and show it on the terminal if it takes long."""
        grid.comm.status_slot.now(step, phase)
        phases.now(phase)
        ACTIVITIES.now("step", phase.partition(" of ")[0], step, config.run.steps)

    def score_batches(many: list[MicroBatch]) -> list[Tensor]:
        return built.pipeline.evaluate(many, lambda batch: feed(batch, 0, False))

    blame = partial(_blame, run)
    fingerprint = tokenizer.fingerprint if tokenizer is not None else None
    rate, limit = learning_rate_of(config), run.config.run.time_limit
    end = None if limit is None else limit - spent
    about = about_run(run, start, built, data.digest(), fingerprint)
    trainer = Trainer(
        engine,
        built.pipeline,
        lambda batch, step: feed(batch, step, True),
        loader_of(part, data, grid["data"], device),
        [
            *(_validation(run, part, *named, score_batches, tokenizer) for named in data.validation.items()),
            *run.evaluations(config, grid, device, built, tokenizer, run.folder.path),
        ],
        _recorder(run, start, part, planned, phases),
        TrainSchedule(
            *(config.run.steps, rate, config.observe.every, course.until(part)),
            averages=config.optimizer.average.for_validation,
        ),
        checkpoints_of(run, start, built, about),
        Stopping(
            run.grid["world"], device, run.signals, run.folder.stop, end, first_step=run.folder.early_stops.forget
        ),
        lambda: write_ledger(run.folder, grid, device),
        now,
        blame,
        Spikes(config.run.spike_factor, skips=config.run.on_spike == "skip", say=warn if run.is_first else str),
        Replicas(engine, config.observe.check_replicas, now, blame).check,
    )
    return Ready(trainer, about, holdings_of(built, saves=False), ops, planned, disks, data, tokenizer)


def _built(run: Run, config: Config, here: int) -> tuple[Operations, PagedHome | None, Built]:
    """Return the kernels of the device, the disks, and the parts that compute a step."""
    device, kernels = run.device, config.precision.kernels
    repeat_bits(config, device)
    ops = choose(kernels, device, DTYPES[config.precision.dtype], deterministic=config.run.deterministic)
    host_ops = None
    if config.zero.offload.optimizer != "none" and device.type != "cpu":
        host_ops = for_host(kernels, precision_of(config).update)
    disks = open_disks(run.homes, config, device, run.grid.comm.ledger, here)
    built = build(config, run.grid, device, ops, host_ops=host_ops, homes={"nvme": disks} if disks else {})
    check(built.pipeline.schedule(config.batch.global_ // (config.batch.rows * run.grid["data"].size)))
    settle_attention(config, built.model, device, first=run.is_first)
    return ops, disks, built


def _opened(run: Run, part: Part, course: Course, tokenizer: Tokenizer | None) -> RunData:
    """Open a run's data and check it against its tokenizer; rank 0 also refuses validation data that is trained on."""
    with doing("opening the data"):
        data = open_data(part.config, course)
        refuse_repeats(data)
        for source in data.mixture.sources:
            _origin_of(source.windows, tokenizer)
        if run.is_first:  # the other ranks would read the same
            refuse_overlap(part.config, data)
    return data


def loader_of(part: Part, data: RunData, axis: Axis, device: torch.device) -> BatchLoader:
    """Return the loader of one data rank's micro-batches of each step, for its device."""
    upload, batch = Upload(device), part.config.batch
    return BatchLoader(
        data.mixture,
        global_batch=batch.global_,
        micro_batch=batch.rows,
        data_rank=axis.rank,
        num_data=axis.size,
        begins=(part.first, part.samples),
        ends=data.course.until(part),
        others=data.others,
        pack=None if device.type == "cpu" else upload.pack,
        stop=upload.stop,
    )


def _blame(run: Run, own: Fault | None, say: Callable[[int, str | None], UserError]) -> UserError:
    """Return the error: the fault's, on the first rank with one (else rank 0); `FailedElsewhere` on all other ranks.

    `own` is this rank's fault, if any; `say` makes an error from (rank, the fault in words).
    """
    found = [json.loads(text) for text in run.gather(json.dumps(own))]
    faulty = [rank for rank, fault in enumerate(found) if fault]
    rank = min(faulty, key=lambda rank: (found[rank][0], rank), default=0)
    if rank != run.grid["world"].rank:
        return FailedElsewhere(rank, say(rank, None).code)
    error = say(rank, own[1] if own else None)
    if own and own[0] == AFTER_SUMS:
        return error
    look = f"`megazero data --run {shlex.quote(str(run.folder.path))} --step {error.step}` shows its text"
    return UserError(error.code, error.what, f"{look}; {error.do}", rank=rank, step=error.step)


def _recorder(run: Run, start: Start, part: Part, planned: Planned, phases: PhaseSeconds) -> Recorder:
    """Return the observer of a part's steps; only the first rank of the world writes rows and profiles."""
    device, ledger, config = run.device, run.grid.comm.ledger, part.config
    flops = flops_per_token(model_shape(config))
    peak = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), config.precision.dtype)
    before = part.first, part.tokens
    work = Work(part.tokens_per_step, flops, peak, device, run.grid["world"].size, before=before)
    sinks = Sinks(list(_sinks(run, start)) if run.is_first else [])
    at = config.observe.profile if run.is_first else None
    profile = Profile(at or 1, 0 if at is None else _PROFILED_STEPS, run.folder.profile)
    return Recorder(sinks, profile, work, ledger, partial(compare, planned, run.grid), phases)


def learning_rate_of(config: Config) -> LearningRate:
    """Return the schedule of the learning rate of a part of a run."""
    s = config.schedule
    assert s.cooldown is not None, "a resolved config"
    total = config.run.steps if s.steps is None else s.steps
    warmup, step = s.warmup, config.batch.global_ * config.model.seq_len
    if s.warmup_tokens is not None:
        warmup = -(-s.warmup_tokens // step)
    return LearningRate(config.optimizer.lr, s.min_lr, warmup, total, s.decay, s.cooldown, s.points or ())


def _validation(
    run: Run,
    part: Part,
    name: str,
    dataset: WindowDataset,
    losses: Callable[[list[MicroBatch]], list[Tensor]],
    tokenizer: Tokenizer | None,
) -> Validation:
    grid, micro, samples = run.grid, part.config.batch.rows, part.config.data.valid_samples
    how = name, part.config.data.valid_every
    token_bytes = _text_bytes(dataset, tokenizer)

    def batches() -> Iterator[MicroBatch]:
        return validation_batches(dataset, micro, samples, data_rank=grid["data"].rank, num_data=grid["data"].size)

    where = grid.partial("loss"), grid["pipeline"].size, run.device
    validation = Validation(*how, batches, losses, token_bytes, *where)
    validation.check(str(dataset.stream.dataset.bin_path))
    return validation


def _origin_of(data: WindowDataset, tokenizer: Tokenizer | None) -> Origin | None:
    """Return the origin of a data set, after a check against its files and the tokenizer.

    Raises:
        UserError: 203, the recorded origin is that of other files; 217, 221, the data was made with another
            tokenizer; 225, the mask is missing or is not the recorded one.
    """
    dataset = data.stream.dataset
    shards = dataset.shards if isinstance(dataset, JoinedDataset) else [dataset]
    return joined([origin_of(files, tokenizer) for files in shards], dataset.prefix)


def _text_bytes(data: WindowDataset, tokenizer: Tokenizer | None) -> np.ndarray | None:
    """Return the bytes of text of each id, [vocab], as float64 if scaled to the data set's means; None: no tokenizer.

    Raises:
        UserError: as `_origin_of`.
    """
    origin = _origin_of(data, tokenizer)
    if tokenizer is None:
        return None
    sizes = tokenizer.token_bytes()
    return sizes if tokenizer.lossless or origin is None else sizes * origin.bytes_scale


def _sinks(run: Run, start: Start) -> Iterator[Sink]:
    folder, config, observe = run.folder, run.config, run.config.observe
    yield JsonlSink(folder.metrics)
    yield ConsoleSink(config.run.steps, sys.stdout)
    if observe.tensorboard:
        yield TensorboardSink(folder.path / "tensorboard")
    if observe.wandb is not None:
        yield WandbSink(observe.wandb, folder.path.name, start.run, flatten(config), folder.path)
