"""Generate text with a trained run: the run's own config, its newest weights, its tokenizer.

One prompt is continued on the command line, or all prompts of a file of JSON lines, {"prompt": "text"} or {"messages":
[...]}, into another one. There each prompt has one line with its text; a command that was interrupted goes on after the
last complete line. Several ranks of this machine split the matrices (tensor parallelism).
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.comm.context import CommContext
from megazero.comm.grid import Axis, make_grid, single
from megazero.generation.decode import Decoder
from megazero.generation.sampling import Sampling
from megazero.generation.text import Prompt, Writer
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

    run: Path
    prompt: str | None
    prompts: Path | None
    out: Path | None
    sampling: Sampling
    stop: Sequence[str] = ()
    chat: bool = False
    batch: int = 8
    nproc: int = 1
    average: bool = False


def generate(asked: Request, say: Callable[[str], object]) -> int:
    """Generate the texts of a request; return the exit code.

    Args:
        say: called with the text of a single prompt.

    Raises:
        UserError: 113, the config names no tokenizer; 106, heads that so many ranks cannot split; 229, a prompt that
            is none; 403, the output cannot be written; and those of `load` and `Writer`.
    """
    prompts = [asked.prompt] if asked.prompt is not None else prompts_of(asked.prompts)
    done = 0 if asked.out is None else _done(asked.out, len(prompts))

    def work(comm: CommContext, world: World) -> None:
        device_type = "cuda" if comm.backend == "nccl" else "cpu"
        grid = single(comm) if world.size == 1 else make_grid(comm=comm, device_type=device_type, tensor=world.size)
        _write(asked, prompts, done, say, grid["tensor"], world)

    return on_ranks(asked.nproc, work)


def _write(
    asked: Request, prompts: Sequence[Prompt], done: int, say: Callable[[str], object], axis: Axis, world: World
) -> None:
    opened = load(asked.run, average=asked.average, tensor=axis, device=world.device)
    if opened.tokenizer is None:
        raise UserError(113, "the run has no data.tokenizer", "train with one to get text", where=asked.run)
    writer = Writer(Decoder(opened.model), opened.tokenizer, asked.sampling, asked.stop, asked.chat, asked.batch)
    with doing("generating", len(prompts) - done) as progress:
        for prompt, text in zip(prompts[done:], writer.texts(prompts[done:], first=done), strict=True):
            progress.advance()
            if axis.rank == 0 and asked.out is None:
                say(text)
            elif axis.rank == 0 and asked.out is not None:
                key = "prompt" if isinstance(prompt, str) else "messages"
                with asked.out.open("a") as file:
                    file.write(json.dumps({key: prompt, "text": text}, ensure_ascii=False) + "\n")


def prompts_of(path: Path | None) -> list[Prompt]:
    """Return the prompts of a file. Raises UserError 229: it cannot be read, or a line has no prompt."""
    assert path is not None
    do, found = 'give lines such as {"prompt": "text"} or {"messages": [...]}', list[Prompt]()
    try:
        with path.open(encoding="utf-8") as file:
            lines = [*file]  # `splitlines` would also cut at separators inside of a text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(229, f"prompts cannot be read: {error}", do, where=path) from None
    for number, line in enumerate(lines, 1):
        try:
            record: Any = json.loads(line)
            one = record.get("prompt", record.get("messages"))
            if not isinstance(one, str | list):
                raise ValueError("no prompt")
        except (ValueError, AttributeError):
            raise UserError(229, f"line {number:,} has no prompt", do, where=path) from None
        found.append(one)
    return found


def _done(out: Path, most: int) -> int:
    """Return the number of complete lines of an output; remove an incomplete one. Raises UserError 403, 229."""
    try:
        if not out.exists():
            out.touch()
            return 0
        content = out.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with out.open("r+b") as file:
                file.truncate(whole)
    except OSError as error:
        raise UserError(403, f"cannot be written: {error.strerror}", "give another --out", where=out) from None
    done = content[:whole].count(b"\n")
    if done > most:
        raise UserError(229, f"has {done:,} lines for {most:,} prompts", "give another --out", where=out)
    if done:
        logging.getLogger("megazero").info("%s has %d of %d texts already", out, done, most)
    return done
