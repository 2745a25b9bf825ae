"""Describe a run when it begins, and its results when it ends."""

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch

from megazero.base.packages import is_installed
from megazero.builders.pipeline import model_shape
from megazero.checkpoint.manifest import Manifest
from megazero.comm.grid import Grid
from megazero.config.flat import flatten, spelt
from megazero.config.schema import Config, LrSchedule
from megazero.config.stages import Course, Part
from megazero.launcher.environment import gpu_settings
from megazero.launcher.world import World
from megazero.observe.console import clock_text
from megazero.observe.metrics import EVAL, VALID_BITS, VALID_LOSS, results, valid_losses
from megazero.plan.layers import parameters
from megazero.run.build import Ready, learning_rate_of
from megazero.run.data import packing_text, sources_text
from megazero.run.folder import RunFolder
from megazero.run.history import changed_since, in_words, saved_options
from megazero.run.loading import described, doubt, taken
from megazero.run.resume import Start
from megazero.run.run import Run
from megazero.train.trainer import Trainer
from megazero.zero.unit import resting_table

_SCHEDULE = [f"schedule.{key}" for key in LrSchedule.model_fields]


def beginning(run: Run, start: Start, part: Part, ready: Ready, found: Manifest | None) -> Iterator[str]:
    """Yield the run's first lines: what is trained, on which data and into which folder, then what rests where.

    Args:
        found: the manifest of the checkpoint that it begins with; None: it begins without one.
    """
    config, grid, course = part.config, run.grid, ready.data.course
    steps = ", then ".join(f"{size:,}" for size, _ in groupby(each.tokens_per_step for each in course.parts))
    line = f"{run.name}: {parameters(model_shape(config)):,} parameters, {config.run.steps:,} steps of "
    line += f"{steps} tokens on {_devices(grid, run.device)}, into {run.folder.path}"
    yield line if found is None else line + described(found, start, ready.about)
    if found is not None and taken(found, start.load) == "all":
        yield from _other_rate(config, course, found)
    if changed := changed_since(found, ready.about.history):
        yield f"changed after step {changed[0]['step']}, as --allow-change permits: " + ", ".join(in_words(changed))
    yield f"data {sources_text(ready.data)}, tokenizer {_tokenizer(config, ready)}"
    yield from packing_text(ready.data)
    yield _resting(config, ready.trainer)
    if run.device.type == "cuda":
        yield f"CUDA runs with {gpu_settings()}"


def _other_rate(config: Config, course: Course, found: Manifest) -> Iterator[str]:
    """Yield a line if the next step has another learning rate than with the options of its checkpoint."""
    assert found.progress is not None, "a run that goes on"
    theirs, keys = saved_options(found), ("run.steps", "optimizer.lr", "stages", *_SCHEDULE)
    changes = [{"step": found.step, "key": key, "from": theirs.get(key)} for key in keys]
    courses = Course(config, changes).eras()[0][1], course
    before, now = (learning_rate_of(each.part(found.step).config) for each in courses)
    old, new = (rate.at(found.progress.updates) for rate in (before, now))
    if old != new:
        keep = f"; schedule.steps={before.total} keeps the old schedule" if before.total != now.total else ""
        yield f"learning rate of step {found.step + 1}: {old:.4g} before these options, {new:.4g} now{keep}"


def next_part(before: Part, part: Part, of: int) -> str:
    """Return the line that is printed when a part of a run begins.

    Args:
        before: the part that has ended.
        of: the number of steps of the run.
    """
    old, new = flatten(before.config), flatten(part.config)
    other = [f"{key} {spelt(old[key])} -> {spelt(new[key])}" for key in new if old[key] != new[key]]
    other = [text for text in other if not text.startswith("data.sources ")]
    return f"step {part.first + 1} of {of}: {part.name or 'after the last stage'}: {', '.join(other)}"


def _tokenizer(config: Config, ready: Ready) -> str:
    """Describe the tokenizer of a run."""
    if ready.tokenizer is None:
        return "none: ids alone"
    told = ", which changes text: bits per byte count the original text's bytes, where the data's origin is known"
    return f"{config.data.tokenizer}{'' if ready.tokenizer.lossless else told}"


def doubts(start: Start, part: Part, ready: Ready, found: Manifest | None) -> Iterator[str]:
    """Yield a warning for each setting that is accepted but probably not intended."""
    config = part.config
    if found is not None and (said := doubt(found, start, ready.about)):
        yield said
    if not is_installed("matplotlib"):
        yield "the loss curve will not be drawn: matplotlib is not installed (pip install matplotlib)"
    warmup, steps, peak = config.schedule.warmup, config.run.steps, config.optimizer.lr
    if warmup > steps:
        reached = f"the learning rate ends at {peak * steps / warmup:.3g} and never reaches optimizer.lr {peak:.3g}"
        yield f"schedule.warmup {warmup} is longer than run.steps {steps}: {reached}"
    vocab, tokenizer = config.model.vocab, ready.tokenizer
    if tokenizer is not None and (unused := vocab - tokenizer.vocab_size):
        used = f"{tokenizer.path} has {tokenizer.vocab_size:,} ids"
        yield f"model.vocab is {vocab:,}, {used}: {unused:,} rows ({unused / vocab:.2%}) are never used"


def ending(scores: Mapping[str, float], folder: RunFolder, seconds: float) -> str:
    """Return the last lines of a completed run.

    Args:
        scores: the results of the last evaluations.
    """
    lines = [f"done in {clock_text(seconds)}"]
    for key in valid_losses(scores):
        name = key.removeprefix(VALID_LOSS)
        lines.append(f"validation loss {f'of {name[1:]} ' if name else ''}{scores[key]:.4f} nats per token")
        if (bits := scores.get(f"{VALID_BITS}{name}")) is not None:
            lines[-1] += f", {bits:.4f} bits per byte"
    lines += [f"{key.removeprefix(EVAL)} {scores[key]:.4f}" for key in results(scores)]
    files = "metrics.jsonl, config.yaml, plan.json, ledger.json, checkpoints/, logs/"
    lines.append(f"files in {folder.path}: {files}{', samples/' * (folder.path / 'samples').exists()}")
    if folder.loss_plot.exists():
        lines.append(f"loss curve {folder.loss_plot}")
    return "\n".join(lines)


def sharing(world: World, grid: Grid) -> str:
    """Return the line that says what `--share-gpus` means here."""
    if grid.comm.host_staging is None:
        return "--share-gpus has no effect: " + ("one rank" if world.device.type == "cuda" else "there is no GPU")
    what = f"--share-gpus: {grid['world'].size} ranks share their hosts' GPUs ({torch.cuda.device_count()} here)"
    return f"{what} and use gloo through pinned memory: only to try layouts out, every message waits for the host"


def _resting(config: Config, trainer: Trainer) -> str:
    grid = trainer.engine.grid
    shard, replicas = grid["shard"].size, grid["replica"].size
    title = f"ZeRO stage {config.zero.stage} over {shard} data rank{'s' * (shard > 1)}, "
    title += f"replicated over {replicas} such groups, " if replicas > 1 else ""
    return title + "held by this rank between steps:\n" + resting_table(trainer.engine.units)


def _devices(grid: Grid, device: torch.device) -> str:
    if grid["world"].size == 1:
        return str(device)
    axes = ((a.name, a.size) for a in (grid["tensor"], grid["pipeline"], grid["data"]) if a.size > 1)
    return f"{grid['world'].size} {device.type} ranks ({' x '.join(f'{name} {size}' for name, size in axes)})"
