"""Build a run from a config: trainer, data, validation, sinks, and what is written at the end."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megazero.base.doing import ACTIVITIES, doing
from megazero.base.errors import FailedElsewhere, UserError
from megazero.build.assemble import DTYPES, build, feeds_of, precision_of
from megazero.build.pipeline import model_shape
from megazero.build.upload import Upload
from megazero.checkpoint.save import ShardState
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Axis, Grid
from megazero.comm.home import PagedHome
from megazero.comm.ledger import Ledger
from megazero.config.file import flatten
from megazero.config.schema import Config
from megazero.config.stages import Course, Part
from megazero.data.joined import JoinedDataset
from megazero.data.loader import BatchLoader, validation_batches
from megazero.data.origin import Origin, joined, require_counts, require_mask, require_tokenizer
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.data.windows import MicroBatch, WindowDataset
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose, for_host
from megazero.observe.console import ConsoleSink
from megazero.observe.jsonl import JsonlSink
from megazero.observe.phases import PhaseSeconds
from megazero.observe.profile import Profile
from megazero.observe.recorder import Recorder, Work
from megazero.observe.sinks import Sink, Sinks, warn
from megazero.observe.tensorboard_sink import TensorboardSink
from megazero.observe.unit_table import UnitEvents, UnitTableSink
from megazero.observe.wandb_sink import WandbSink
from megazero.optim.learning_rate import LearningRate
from megazero.plan.hardware import peak_flops
from megazero.run.attention import repeat_bits, settle_attention
from megazero.run.checkpointing import (
    CheckpointMetadata,
    Identity,
    RunContext,
    about_run,
    checkpoints_of,
    holdings_to_load,
)
from megazero.run.data import RunData, open_data, refuse_overlap, refuse_repeats, refuse_short
from megazero.run.disks import open_disks
from megazero.run.folder import RunFolder
from megazero.run.folder_watch import FolderWatch
from megazero.run.ledger_file import write_ledger
from megazero.run.plan_check import Expectation
from megazero.train.stopping import Stopping
from megazero.train.trainer import AFTER_SUMS, Fault, Trainer, TrainSchedule
from megazero.train.validation import Validation
from megazero.zero.engine import Engine

_PROFILED_STEPS = 3


class Ready(NamedTuple):
    """A trainer, what checkpoints say of it, tensors to fill from one, the device's kernels, disks, data, tokenizer."""

    trainer: Trainer
    about: CheckpointMetadata
    holdings: list[ShardState]
    ops: Operations
    disks: PagedHome | None
    data: RunData
    tokenizer: Tokenizer | None

    def close(self) -> None:
        """End background work; what rests on disks is gone."""
        self.trainer.close()
        if self.disks is not None:
            self.disks.close()


def build_trainer(
    whole: Config,
    grid: Grid,
    device: torch.device,
    site: RunContext,
    here: int = 1,
    *,
    part: Part | None = None,
    spent: float = 0.0,
) -> Ready:
    """Build everything that one rank of a part of a run needs, in the order in which it depends on each other.

    Only the first rank of the world writes rows and profiles. It does not communicate, so each rank may fail on its
    own; the caller makes the ranks agree.

    Args:
        whole: the run's config.
        here: ranks that share this host's memory.
        part: of the run; None: its first.
        spent: seconds that the job has trained before.

    Raises:
        UserError: 2xx, the data is missing, damaged, too small or used too often; 112, a tokenizer that is not the
            model's; 114, fused kernels that cannot be had; 160 and 161, a package that is not installed.
    """
    course = Course(whole, site.job.history)
    part = part or course.parts[0]
    config, dtype = part.config, DTYPES[whole.precision.dtype]
    tokenizer = _tokenizer(config)
    first = grid["world"].rank == 0
    data = _opened(part, course, tokenizer, first=first)
    repeat_bits(config, device)
    ops = choose(config.precision.kernels, device, dtype, deterministic=config.run.deterministic)
    host_ops = None
    if config.zero.offload.optimizer != "none" and device.type != "cpu":
        host_ops = for_host(config.precision.kernels, precision_of(config).masters)
    disks = open_disks(config, device, grid.comm.ledger, here)
    built = build(config, grid, device, ops, host_ops=host_ops, homes={"nvme": disks} if disks else {})
    settle_attention(config, built.model, device, first=first)
    engine, pipeline = built.engine, built.pipeline
    feed = feeds_of(grid["tensor"], device, config.parallel.sequence)
    comm, folder, phases = grid.comm, site.folder, PhaseSeconds()

    def now(step: int, phase: str) -> None:
        """Record what this rank does where the others can read it, and on the terminal if it takes long."""
        comm.status_slot.now(step, phase)
        phases.now(phase)
        ACTIVITIES.now(f"step {step}/{config.run.steps}", phase.partition(" of ")[0])

    def score_batches(many: list[MicroBatch]) -> list[Tensor]:
        return pipeline.evaluate(many, lambda batch: feed(batch, 0, False))

    about = about_run(whole, built, grid, site, Identity.of(data.digest(), tokenizer))
    trainer = Trainer(
        engine,
        pipeline,
        lambda batch, step: feed(batch, step, True),
        loader_of(part, data, grid["data"], device),
        {
            name: _validation(config, windows, score_batches, tokenizer, grid, device)
            for name, windows in data.validation.items()
        },
        Recorder(
            _sinks(whole, site, first, engine, comm.ledger),
            _profile(config, folder, first),
            _work(part, device, grid["world"].size),
            comm.ledger,
            Expectation(config, grid, device, ops).compare,
            phases,
        ),
        _pace(part),
        checkpoints_of(config, built, grid, device, about, site),
        _stopping(None if config.run.time_limit is None else config.run.time_limit - spent, grid, device, site),
        lambda: write_ledger(folder, grid, device),
        now,
        lambda own, say: _blame(own, say, grid, device, folder),
    )
    return Ready(trainer, about, holdings_to_load(built), ops, disks, data, tokenizer)


def _tokenizer(config: Config) -> Tokenizer | None:
    path = config.data.tokenizer
    return None if path is None else open_tokenizer(path, config.model.vocab)


def _stopping(limit: float | None, grid: Grid, device: torch.device, site: RunContext) -> Stopping:
    """Return what ends a run before its last step.

    Args:
        limit: seconds from now on; None: none.
    """
    forget, look = site.folder.early_stops.forget, FolderWatch(site.folder, warn).look
    return Stopping(grid["world"], device, site.signals, site.folder.stop, limit, first_step=forget, look=look)


def _opened(part: Part, course: Course, tokenizer: Tokenizer | None, *, first: bool) -> RunData:
    """Open the data of a run, and hold it against its tokenizer; the first rank looks for what is trained on, too."""
    with doing("opening the data"):
        data = open_data(part.config, course)
        refuse_repeats(data)
        refuse_short(course, part)
        for source in data.mixture.sources:
            _origin_of(source.windows, tokenizer)
        if first:  # the others would read the same
            refuse_overlap(part.config, data)
    return data


def loader_of(part: Part, data: RunData, axis: Axis, device: torch.device) -> BatchLoader:
    """Return the loader of the micro-batches of each step on one rank of the data axis, for its device."""
    upload, batch = Upload(device), part.config.batch
    return BatchLoader(
        data.mixture,
        global_batch=batch.global_,
        micro_batch=batch.rows,
        data_rank=axis.rank,
        num_data=axis.size,
        begins=(part.first, part.samples),
        ends=part.end,
        others=data.others,
        pack=None if device.type == "cpu" else upload.pack,
        stop=upload.stop,
    )


def _blame(
    own: Fault | None,
    say: Callable[[int, str | None], UserError],
    grid: Grid,
    device: torch.device,
    folder: RunFolder,
) -> UserError:
    """Return the error of the first rank that has found a fault of its own; of rank 0 if none has."""
    found = [json.loads(text) for text in gather_bytes(json.dumps(own).encode(), grid["world"], "agree", device)]
    faulty = [rank for rank, fault in enumerate(found) if fault]
    rank = min(faulty, key=lambda rank: (found[rank][0], rank), default=0)
    if rank != grid["world"].rank:
        return FailedElsewhere(rank, 301)
    error = say(rank, own[1] if own else None)
    if own and own[0] == AFTER_SUMS:
        return error
    look = f"`megazero data --run {shlex.quote(str(folder.path))} --step {error.step}` shows its text"
    return UserError(error.code, error.what, f"{look}; {error.do}", rank=rank, step=error.step)


def _work(part: Part, device: torch.device, ranks: int) -> Work:
    """Return the work of a step of a part, on one of some ranks."""
    dtype, flops = part.config.precision.dtype, model_shape(part.config).flops_per_token()
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return Work(part.tokens_per_step, flops, peak, device, ranks, before=(part.first, part.tokens))


def _pace(part: Part) -> TrainSchedule:
    config, rate = part.config, learning_rate_of(part.config)
    return TrainSchedule(config.run.steps, rate, config.observe.every, config.data.valid_every, part.end)


def learning_rate_of(config: Config) -> LearningRate:
    """Return the schedule of the learning rate of a part of a run."""
    s = config.schedule
    assert s.cooldown is not None, "a resolved config"
    total = config.run.steps if s.steps is None else s.steps
    return LearningRate(config.optimizer.lr, s.min_lr, s.warmup, total, s.decay, s.cooldown)


def _validation(
    config: Config,
    dataset: WindowDataset,
    losses: Callable[[list[MicroBatch]], list[Tensor]],
    tokenizer: Tokenizer | None,
    grid: Grid,
    device: torch.device,
) -> Validation:
    micro, samples = config.batch.rows, config.data.valid_samples
    token_bytes = _text_bytes(dataset, tokenizer)

    def batches() -> Iterator[MicroBatch]:
        return validation_batches(dataset, micro, samples, data_rank=grid["data"].rank, num_data=grid["data"].size)

    validation = Validation(batches, losses, token_bytes, grid.partial("loss"), grid["pipeline"].size, device)
    validation.check(str(dataset.stream.dataset.bin_path))
    return validation


def _origin_of(data: WindowDataset, tokenizer: Tokenizer | None) -> Origin | None:
    """Return what a data set was made of, once that fits its files and the tokenizer.

    Raises:
        UserError: 203, what is written of the data's origin is of other files; 217, 221, it was made by another
            tokenizer; 225, it has another mask.
    """
    dataset, origins = data.stream.dataset, list[Origin | None]()
    for files in dataset.shards if isinstance(dataset, JoinedDataset) else [dataset]:
        origin = require_tokenizer(files.prefix, tokenizer)
        require_counts(origin, files.num_documents, files.num_tokens, files.prefix)
        require_mask(origin, files.mask, files.prefix)
        origins.append(origin)
    return joined(origins, dataset.prefix)


def _text_bytes(data: WindowDataset, tokenizer: Tokenizer | None) -> np.ndarray | None:
    """Return the bytes of text that each id stands for, float64 [vocab] where they are means over the whole data set.

    Raises:
        UserError: as `_origin_of`.
    """
    origin = _origin_of(data, tokenizer)
    if tokenizer is None:
        return None
    sizes = tokenizer.token_bytes()
    return sizes if tokenizer.lossless or origin is None else sizes * origin.bytes_scale


def _sinks(config: Config, site: RunContext, first: bool, engine: Engine, ledger: Ledger) -> Sinks:
    if not first:
        return Sinks([])
    folder = site.folder
    sinks: list[Sink] = [JsonlSink(folder.metrics), ConsoleSink(config.run.steps, sys.stdout)]
    if config.observe.table:
        sinks.append(UnitTableSink(UnitEvents(engine.units, ledger.seconds), sys.stdout))
    if config.observe.tensorboard:
        sinks.append(TensorboardSink(folder.path / "tensorboard"))
    if config.observe.wandb is not None:
        sinks.append(WandbSink(config.observe.wandb, folder.path.name, site.job.run, flatten(config), folder.path))
    return Sinks(sinks)


def _profile(config: Config, folder: RunFolder, first: bool) -> Profile:
    if config.observe.profile is None or not first:
        return Profile(1, 0, folder.profile)
    return Profile(config.observe.profile, _PROFILED_STEPS, folder.profile)
