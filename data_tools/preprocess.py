"""Turn text into a token data set, PREFIX.bin and PREFIX.idx.

    python data_tools/preprocess.py --input books/ web.jsonl --tokenizer books.model --output data/books

Every document is encoded and ended with the tokenizer's end-of-document id. Ids are stored as uint16 where the
vocabulary has at most 65,536 of them, else as int32. Empty documents are skipped and counted. The data set appears
whole or not at all.

The text is checked before the first token is made: encoding takes hours where checking takes minutes, and a file that
is not UTF-8 at the end of a corpus would throw all of it away. Keeping what is finished would be the other way; it
would leave a data set that is not what was asked for.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: from the repository, not from this folder, whose inspect.py hides Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from data_tools import begin

    begin(__file__)  # before the imports, which take a second on a busy machine

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from data_tools.command import Parser, add_inputs, add_output, positive, run
from data_tools.corpus import Skipped, check_files, find_files, read_pieces
from data_tools.encoding import encode_pieces
from megazero.base.answers import tell
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.heartbeat import HEART
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.origin import Origin, path_of
from megazero.data.tokenizer import Tokenizer, open_tokenizer


@dataclass
class Summary:
    """The counts of what went into a data set; bytes are those of the text, id_bytes those that its ids stand for."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0
    id_bytes: int = 0
    longest: int = 0


def preprocess(options: argparse.Namespace) -> None:
    tokenizer = open_tokenizer(options.tokenizer)
    with doing("finding files"):
        files = find_files(options.input, options.suffix)
    started = time.monotonic()
    skipped = Skipped() if options.skip_bad else None
    if skipped is None:
        check_files(files, options.key)
    with _progress(sum(path.stat().st_size for path in files)) as advance:
        summary = _write(options, tokenizer, files, skipped, advance)
    seconds = time.monotonic() - started
    (skipped or Skipped()).tell(options.output, tell)
    with HEART.paused():
        print(
            f"{options.output}: {summary.documents:,} documents ({summary.empty:,} empty ones skipped), "
            f"{summary.tokens:,} tokens, {summary.bytes:,} bytes, "
            f"{summary.bytes / summary.tokens:.3f} bytes per token, {seconds:.1f} s"
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, the heartbeat anywhere else; yield what is called with the bytes that were done."""
    console, done = Console(stderr=True), 0
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        HEART.show_on(lambda words: None)
        try:
            with Progress(*columns, console=console, transient=True) as progress:
                bar = progress.add_task("", total=total)
                yield lambda count: progress.advance(bar, count)
        finally:
            HEART.show_on(None)
        return
    with doing("encoding, MB", total // 1_000_000) as beat:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            beat.done = done // 1_000_000

        yield advance


def _write(
    options: argparse.Namespace,
    tokenizer: Tokenizer,
    files: list[Path],
    skipped: Skipped | None,
    advance: Callable[[int], None],
) -> Summary:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 65_536 else np.int32)
    eod = np.array([tokenizer.eod], dtype)
    sizes = tokenizer.token_bytes()
    path_of(options.output).unlink(missing_ok=True)  # of token files that are replaced
    summary, length = Summary(), 0  # length: tokens of the document so far
    pieces = read_pieces(files, options.key, skipped)
    with (
        IndexedDatasetWriter(options.output, dtype) as writer,
        closing(encode_pieces(pieces, options.tokenizer, dtype, options.workers)) as encoded,
    ):
        for piece, ids in encoded:
            writer.append(ids)
            length += len(ids)
            summary.bytes += len(piece.text.encode())
            summary.id_bytes += int(sizes[ids].sum())
            if piece.last and length:
                writer.append(eod)
                writer.end_document()
                summary.longest = max(summary.longest, length + 1)
            if piece.last:
                summary.empty += not length
                length = 0
            advance(piece.bytes_read)
        summary.documents, summary.tokens = writer.num_documents, writer.num_tokens
        if not summary.documents:
            what = f"expected text, got {summary.empty:,} empty documents in {len(files):,} files"
            raise UserError(214, what, "check --input", where=files[0])
    Origin(
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        summary.documents,
        summary.tokens,
        summary.bytes,
        summary.id_bytes,
        summary.longest,
    ).write(options.output)
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (command.py)."""
    parser = Parser(prog="preprocess.py", description="Turn text into a token data set.")
    add_inputs(parser)
    add_output(parser)
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="MODEL", help="from train_tokenizer.py")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # ours, else all
    parser.add_argument("--workers", type=positive, default=cores, help="processes that encode (default: all cores)")
    return run(preprocess, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
