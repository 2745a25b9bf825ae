"""Evaluate a run: mean loss, perplexity and bits per byte of texts, and tasks of lm-eval.

The run's newest weights are loaded onto the ranks of this machine: tensor ranks split matrices, data ranks shard the
parameters (stage 3) and share the windows. No gradients and no optimizer state are allocated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.builders.assemble import DTYPES, Built, build, grid_of
from megazero.builders.job import changed, job_of, laid_out
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import Manifest, read_manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_whole, require_shapes, with_averages
from megazero.comm.context import CommContext
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.data.tokenizer import open_tokenizer
from megazero.evaluation.calls import Calls
from megazero.evaluation.scorer import Scorer
from megazero.evaluation.windows import read_text
from megazero.kernels.select import choose
from megazero.launcher.world import World
from megazero.model.parameter import whole_shapes
from megazero.observe.sinks import warn
from megazero.run.checkpointing import holdings_of
from megazero.run.folder import RunFolder
from megazero.tools.local_ranks import on_ranks
from megazero.tools.opened import require_rules


@dataclass(frozen=True)
class Request:
    """The request of a command.

    Attributes:
        texts: files of text.
        tasks: of lm-eval: names, or files.
        stride: new tokens that a window scores; None: half of the model's sequence length.
        nproc, tensor: ranks, and how many of them split the matrices.
        batch: windows or texts at once on a data rank.
        average: evaluate the averages of the weights.
    """

    folder: Path
    texts: Sequence[Path] = ()
    tasks: Sequence[str] = ()
    stride: int | None = None
    nproc: int = 1
    tensor: int = 1
    batch: int = 8
    average: bool = False


Found = dict[str, dict[str, Any]]  # "texts": results by file; "tasks": numbers by TASK.METRIC


def evaluate(asked: Request, say: Callable[[Found], object]) -> int:
    """Evaluate a run on the texts and tasks of a request; return the exit code.

    Args:
        say: called with the results.

    Raises:
        UserError: 106, ranks that cannot split the model, or a stride longer than a window; 113, the config names no
            tokenizer; 229, a text that cannot be read, or is empty; 230, a task that is unknown; and those of a
            checkpoint that cannot be loaded.
    """
    folder = RunFolder(asked.folder)
    folder.require_run()
    config = _laid_out(load(str(folder.config)), asked)
    if config.data.tokenizer is None:
        raise UserError(113, "the run has no data.tokenizer", "train with one", where=folder.config)
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab)
    texts = {str(path): read_text(path, tokenizer) for path in asked.texts}

    def work(comm: CommContext, world: World) -> None:
        grid, device = grid_of(config, comm, world), world.device
        ops = choose(config.precision.kernels, device, DTYPES[config.precision.dtype])
        built = build(config, grid, device, ops, filled=False, trains=False)
        _load(folder, built, average=asked.average)
        scorer = Scorer(config, grid, device, built)
        with doing("evaluating texts", len(texts)) as progress:
            of_texts = dict[str, Any]()
            for name, (ids, size) in texts.items():
                of_texts[name] = scorer.of_text(ids, size, tokenizer.eod, asked.stride)
                progress.advance()
        calls = Calls(scorer, tokenizer, grid)
        of_tasks = calls.serve(lambda: _numbers(asked, calls)) if asked.tasks else {}
        if world.rank == 0:
            say({name: of for name, of in (("texts", of_texts), ("tasks", of_tasks)) if of})

    return on_ranks(asked.nproc, work)


def _numbers(asked: Request, calls: Calls) -> dict[str, float]:
    from megazero.evaluation.tasks import Tasks

    return Tasks(asked.tasks, calls.scorer.length).numbers(calls)


def _laid_out(config: Config, asked: Request) -> Config:
    """Return the config on the ranks that are asked for. Raises UserError 106."""
    if asked.nproc % asked.tensor:
        what = f"--tensor {asked.tensor} does not divide --nproc {asked.nproc}"
        raise UserError(106, what, "change one of the two", where="eval")
    data = asked.nproc // asked.tensor
    if (asked.stride or 1) > config.model.seq_len:
        what = f"--stride {asked.stride} is more than a window, model.seq_len {config.model.seq_len}"
        raise UserError(106, what, "give a smaller stride", where="eval")
    config = changed(config, {"batch.micro": asked.batch, "batch.global_": asked.batch * data})
    job = job_of(config, config.parallel.tensor * config.parallel.pipeline).alone
    laid = laid_out(config, replace(job, tensor=asked.tensor, data=data, stage=3 if data > 1 else 1))
    require_rules(laid, "eval")
    return laid


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


def as_text(found: Found) -> str:
    """Return the results as lines of text."""
    lines = []
    for name, of in found.get("texts", {}).items():
        said = "loss {loss:.4f}, perplexity {perplexity:.4g}, {bits_per_byte:.4f} bits per byte, {tokens:,} tokens"
        lines.append(f"{name}: {said.format(**of)}")
    return "\n".join([*lines, *(f"{name} {value:.4f}" for name, value in found.get("tasks", {}).items())])
