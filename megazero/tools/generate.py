"""Generate text with a trained run: the run's own config, its newest weights, its tokenizer.

Continue one prompt, or all prompts of a file into another file (`generation/prompts.py`). Several ranks of this machine
split the matrices (tensor parallelism).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.base.answers import warn
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.comm.context import CommContext
from megazero.comm.grid import Axis, make_grid, single
from megazero.generation.decode import Decoder
from megazero.generation.prompts import Record, read_prompts, texts_in
from megazero.generation.sampling import Sampling
from megazero.generation.text import Writer
from megazero.launcher.world import World
from megazero.tools.local_ranks import on_ranks
from megazero.tools.opened import load


@dataclass(frozen=True)
class Request:
    """The request of a command.

    Attributes:
        prompt: a text; None: the prompts of `prompts`.
        prompts, out: files of JSON lines.
        nproc: ranks that split the matrices.
        average: generate with the averages of the weights.
    """

    folder: Path
    prompt: str | None
    prompts: Path | None
    out: Path | None
    sampling: Sampling
    stop: Sequence[str] = ()
    chat: bool = False
    batch: int = 8
    nproc: int = 1
    average: bool = False


def generate(asked: Request, say: Callable[[Record], object]) -> int:
    """Generate the texts of a request; return the exit code.

    Args:
        say: called with each prompt and its text, or, if they are in a file, with the number of texts there.

    Raises:
        UserError: 113, the config names no tokenizer; 106, heads that so many ranks cannot split; 112, a prompt is too
            long; those of `load`, of `Writer`, and of the files.
    """
    records = [{"prompt": asked.prompt}] if asked.prompts is None else read_prompts(asked.prompts)
    done = 0 if asked.out is None else texts_in(asked.out, records)

    def work(comm: CommContext, world: World) -> None:
        device_type = "cuda" if comm.backend == "nccl" else "cpu"
        grid = single(comm) if world.size == 1 else make_grid(comm=comm, device_type=device_type, tensor=world.size)
        _write(asked, records[done:], done, say, grid["tensor"], world)

    code = on_ranks(asked.nproc, work) if done < len(records) else 0
    if asked.out is not None and code == 0:
        say({"out": str(asked.out), "texts": len(records), "new": len(records) - done})
    return code


def _write(
    asked: Request, records: Sequence[Record], done: int, say: Callable[[Record], object], axis: Axis, world: World
) -> None:
    """Generate the texts of records; rank 0 appends them to the output, or passes them to `say`.

    Args:
        done: the number of texts that the output has already.
    """
    opened = load(asked.folder, average=asked.average, tensor=axis, device=world.device)
    if opened.tokenizer is None:
        raise UserError(113, "the run has no data.tokenizer", "train with one to get text", where=asked.folder)
    how = asked.sampling, asked.stop, asked.chat, asked.batch, warn if axis.rank == 0 else str
    writer = Writer(Decoder(opened.model), opened.tokenizer, *how)
    prompts = [record["prompt"] if isinstance(record.get("prompt"), str) else record["messages"] for record in records]
    with doing("generating", len(records)) as progress:
        for record, text in zip(records, writer.texts(prompts, first=done), strict=True):
            progress.advance()
            if axis.rank == 0 and asked.out is None:
                say({**record, "text": text})
            elif axis.rank == 0 and asked.out is not None:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**record, "text": text}, ensure_ascii=False) + "\n")
