"""One training run from a checked config to its files: folder, trainer, weights, loss curve, last words."""

import logging
import sys
import time

import torch

from megazero import __version__
from megazero.build import build_trainer, model_shape
from megazero.checkpoint.weights import save_weights
from megazero.config import Config
from megazero.config_file import dump
from megazero.errors import UserError
from megazero.observe.console import clock_text
from megazero.observe.jsonl import read_rows
from megazero.observe.plot import draw_loss
from megazero.parallel.launch import world_from_environment
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
    trainer = None
    folder.create()
    log = _log(folder)
    try:
        dump(config, folder.config)
        trainer = build_trainer(config, world, folder)
        parameters = model_shape(config).parameters()
        start = f"{name}: {parameters:,} parameters, {config.run.steps:,} steps of "
        start += f"{config.batch.global_ * config.model.seq_len:,} tokens on {world.device}, into {folder.path}"
        log.info("%s", start)
        log.info("megazero %s, torch %s, kernels: reference", __version__, torch.__version__)
        print(start, flush=True)
        trainer.run()
    except BaseException as error:
        log.error("%s: %s", type(error).__name__, error)
        raise
    finally:
        if trainer is not None:
            trainer.close()
    weights = save_weights(
        folder.checkpoint(config.run.steps), dict(trainer.engine.named_parameters()), config.run.steps
    )
    draw_loss(read_rows(folder.metrics), folder.loss_plot)
    log.info("saved %s", weights)
    _last_words(trainer, folder, time.monotonic() - began)


def _log(folder: RunFolder) -> logging.Logger:
    log = logging.getLogger("megazero")
    log.setLevel(logging.INFO)
    for handler in list(log.handlers):  # of an earlier run in this process
        log.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(folder.log(0), encoding="utf-8")
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
    try:
        print("\n".join(lines), flush=True)
    except OSError:  # nobody reads standard output any more; the run's files are what counts
        sys.stderr.write("standard output is closed\n")
