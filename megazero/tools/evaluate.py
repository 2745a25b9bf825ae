"""Evaluate a run on texts: mean loss, perplexity, bits per byte.

The run's newest weights are loaded onto the ranks of this machine: tensor ranks split matrices, data ranks shard the
parameters (stage 3) and share the windows. No gradients and no optimizer state are allocated.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.builders.assemble import DTYPES, Built, build, feeds_of, grid_of
from megazero.builders.job import changed, job_of, laid_out
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import Manifest, read_manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_whole, require_shapes, with_averages
from megazero.comm.context import CommContext
from megazero.comm.grid import Grid
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.data.batch import MicroBatch
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.evaluation.windows import batches_of, windows_of
from megazero.kernels.select import choose
from megazero.launcher.world import World
from megazero.model.parameter import whole_shapes
from megazero.observe.sinks import warn
from megazero.run.checkpointing import holdings_of
from megazero.run.folder import RunFolder
from megazero.tools.local_ranks import on_ranks
from megazero.tools.opened import require_rules
from megazero.train.validation import Validation


@dataclass(frozen=True)
class Request:
    """The request of a command.

    Attributes:
        texts: files of text.
        stride: new tokens that a window scores; None: half of the model's sequence length.
        nproc, tensor: ranks, and how many of them split the matrices.
        batch: windows at once on a data rank.
        average: evaluate the averages of the weights.
    """

    run: Path
    texts: Sequence[Path]
    stride: int | None = None
    nproc: int = 1
    tensor: int = 1
    batch: int = 8
    average: bool = False


def evaluate(asked: Request, say: Callable[[dict[str, dict[str, float]]], object]) -> int:
    """Evaluate a run on the texts of a request; return the exit code.

    Args:
        say: called with {file: {loss, perplexity, bits_per_byte, tokens}}.

    Raises:
        UserError: 106, ranks that cannot split the model; 113, the config names no tokenizer; 229, a text that cannot
            be read, or is empty; and those of a checkpoint that cannot be loaded.
    """
    folder = RunFolder(asked.run)
    folder.require_run()
    config = _laid_out(load(str(folder.config)), asked)
    if config.data.tokenizer is None:
        raise UserError(113, "the run has no data.tokenizer", "train with one", where=folder.config)
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab)
    texts = {str(path): _ids(path, tokenizer) for path in asked.texts}

    def work(comm: CommContext, world: World) -> None:
        found = _scores(grid_of(config, comm, world), world.device, config, asked, texts, tokenizer)
        if world.rank == 0:
            say(found)

    return on_ranks(asked.nproc, work)


def _laid_out(config: Config, asked: Request) -> Config:
    """Return the config on the ranks that are asked for. Raises UserError 106."""
    if asked.nproc % asked.tensor:
        what = f"--tensor {asked.tensor} does not divide --nproc {asked.nproc}"
        raise UserError(106, what, "change one of the two", where="eval")
    data = asked.nproc // asked.tensor
    job = replace(
        job_of(config, config.parallel.tensor * config.parallel.pipeline).alone, tensor=asked.tensor, data=data
    )
    job = replace(job, stage=3 if data > 1 else 1, micro_batch=asked.batch, global_batch=asked.batch * data)
    laid = changed(laid_out(config, job), {"batch.global_": job.global_batch})
    require_rules(laid, "eval")
    return laid


def _ids(path: Path, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Return a text's ids and its bytes. Raises UserError 229: it cannot be read, or is empty."""
    do = "give a file of UTF-8 text to --text"
    try:
        content = path.read_bytes()
        ids = tokenizer.encode(content.decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start:,} is not UTF-8"
        raise UserError(229, f"cannot be read: {why}", do, where=path) from None
    if not ids:
        raise UserError(229, "is empty", do, where=path)
    return ids, len(content)


def _scores(
    grid: Grid,
    device: torch.device,
    config: Config,
    asked: Request,
    texts: dict[str, tuple[list[int], int]],
    tokenizer: Tokenizer,
) -> dict[str, dict[str, float]]:
    ops = choose(config.precision.kernels, device, DTYPES[config.precision.dtype])
    built = build(config, grid, device, ops, filled=False, trains=False)
    _load(RunFolder(asked.run), built, average=asked.average)
    feed, length = feeds_of(grid["tensor"], device, config.parallel.sequence), config.model.seq_len

    def losses(many: list[MicroBatch]) -> list[Tensor]:
        return built.pipeline.evaluate(many, lambda batch: feed(batch, 0, False))

    found, stride = {}, min(asked.stride or max(1, length // 2), length)
    for name, (ids, size) in texts.items():
        windows = list(windows_of(ids, tokenizer.eod, length, stride))
        data = grid["data"]
        batches = partial(batches_of, windows, length, asked.batch, data.rank, data.size)
        with torch.no_grad():
            score = Validation(batches, losses, None, grid.partial("loss"), 1, device).score()
        assert score is not None, "nothing stops it"
        bits = score.loss * len(ids) / (math.log(2) * size)
        perplexity = math.exp(score.loss) if score.loss < 700 else math.inf
        found[name] = {"loss": score.loss, "perplexity": perplexity, "bits_per_byte": bits, "tokens": len(ids)}
    return found


def _load(folder: RunFolder, built: Built, *, average: bool) -> None:
    """Load the newest whole checkpoint of a run into all ranks."""
    shapes = whole_shapes(built.model)

    def read(step: Path) -> Manifest:
        manifest = read_manifest(step)
        require_shapes(manifest, shapes, step)
        manifest = with_averages(manifest, step) if average else manifest
        load_tensors(step, manifest, holdings_of(built, saves=False))
        return manifest

    newest_whole(Store(folder.checkpoints), read, warn)
    for unit in built.engine.units:
        built.engine.gather.publish(unit)
    built.engine.gather.finish()


def as_text(found: dict[str, dict[str, float]]) -> str:
    """Return the results as lines of text."""
    lines = []
    for name, of in found.items():
        line = f"{name}: loss {of['loss']:.4f}, perplexity {of['perplexity']:.4g}"
        lines.append(f"{line}, {of['bits_per_byte']:.4f} bits per byte, {of['tokens']:,} tokens")
    return "\n".join(lines)


def as_json(found: Any) -> str:
    """Return the results as one JSON object."""
    return json.dumps({"texts": found})
