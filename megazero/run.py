"""One training run from a checked config to its files: folder, trainer, weights, loss curve, last words."""

import contextlib
import logging
import time

import torch

from megazero import __version__
from megazero.build import build_trainer, model_shape
from megazero.config import Config
from megazero.config_file import dump
from megazero.errors import UserError
from megazero.observe.console import clock_text
from megazero.observe.jsonl import read_rows
from megazero.observe.plot import draw_loss
from megazero.observe.sinks import warn
from megazero.parallel.launch import World, world_from_environment
from megazero.run_folder import RunFolder
from megazero.trainer import Trainer


def run_training(config: Config, name: str) -> None:
    """Trains `config` into its run folder (`runs/<name>` unless run.dir says otherwise).

    Raises:
        UserError: whatever is wrong with the folder, the data, or the numbers.
    """
    world = world_from_environment()
    if world.size > 1:
        raise UserError(109, f"a world of {world.size} ranks is not built yet", "start one process", rank=world.rank)
    folder = RunFolder(config.run.dir or f"runs/{name}")
    began = time.monotonic()
    folder.create()
    log = _log(folder)
    try:
        dump(config, folder.config)
        trainer = _trained(config, world, folder, name)
    except BaseException as error:
        log.error("%s: %s", type(error).__name__, error)
        folder.release()
        raise
    log.info("saved %s", folder.checkpoint(config.run.steps))
    try:
        draw_loss(read_rows(folder.metrics), folder.loss_plot)
    except (OSError, ValueError) as error:  # rows deleted or damaged meanwhile, a full disk: the weights are safe
        warn(f"no loss curve: {error}")
    _last_words(trainer, folder, time.monotonic() - began)


def _trained(config: Config, world: World, folder: RunFolder, name: str) -> Trainer:
    """Builds the trainer, runs it to the end, and closes what it holds, whatever happens."""
    trainer = build_trainer(config, world, folder)
    parameters = model_shape(config).parameters()
    start = f"{name}: {parameters:,} parameters, {config.run.steps:,} steps of "
    start += f"{config.batch.global_ * config.model.seq_len:,} tokens on {world.device}, into {folder.path}"
    logging.getLogger("megazero").info("%s (megazero %s, torch %s)", start, __version__, torch.__version__)
    _say(start)
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        warn(f"a line of {self.baseFilename} is lost (disk full?)")


def _log(folder: RunFolder) -> logging.Logger:
    log = logging.getLogger("megazero")
    log.setLevel(logging.INFO)
    for handler in list(log.handlers):  # of an earlier run in this process
        log.removeHandler(handler)
        handler.close()
    handler = _LogFile(folder.log(0), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    return log


def _last_words(trainer: Trainer, folder: RunFolder, seconds: float) -> None:
    lines = [f"done in {clock_text(seconds)}"]
    if trainer.score is not None:
        lines.append(f"validation loss {trainer.score.loss:.4f} nats per token")
        if trainer.score.bits_per_byte is not None:
            lines[-1] += f", {trainer.score.bits_per_byte:.4f} bits per byte"
    lines.append(f"files in {folder.path}: metrics.jsonl, config.yaml, checkpoints/, logs/")
    lines.append(f"loss curve {folder.loss_plot}")
    _say("\n".join(lines))


def _say(text: str) -> None:
    """Tells whoever watches; without a reader (`| head`) the run goes on, for its files are what counts."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)
