"""Turns text into a token data set, PREFIX.bin and PREFIX.idx.

    python data_tools/preprocess.py --input books/ web.jsonl --tokenizer books.model --output data/books

Every document is encoded and ended with the tokenizer's end-of-document id. Ids are stored as uint16 where the
vocabulary has at most 65,536 of them, else as int32. Empty documents are skipped and counted. The data set appears
whole or not at all.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: from the repository, not from this folder, whose inspect.py hides Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from data_tools.command import Parser, add_inputs, positive, prefix, run
from data_tools.corpus import find_files, read_pieces
from data_tools.encoding import encode_pieces
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.tokenizer import Tokenizer
from megazero.errors import UserError


@dataclass
class Summary:
    """What went into a data set; bytes are those of the text."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0


def preprocess(options: argparse.Namespace) -> None:
    tokenizer = Tokenizer(options.tokenizer)
    files = find_files(options.input)
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=sum(path.stat().st_size for path in files))
        summary = _write(options, tokenizer, files, lambda count: progress.advance(bar, count))
    seconds = time.monotonic() - started
    print(
        f"{options.output}: {summary.documents:,} documents ({summary.empty:,} empty ones skipped), "
        f"{summary.tokens:,} tokens, {summary.bytes:,} bytes, {summary.bytes / summary.tokens:.3f} bytes per token, "
        f"{seconds:.1f} s"
    )


def _write(
    options: argparse.Namespace, tokenizer: Tokenizer, files: list[Path], advance: Callable[[int], None]
) -> Summary:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 65_536 else np.int32)
    eod = np.array([tokenizer.eod], dtype)
    sizes = tokenizer.token_bytes()
    summary, length = Summary(), 0  # length: tokens of the document so far
    pieces = read_pieces(files, options.key)
    with (
        IndexedDatasetWriter(options.output, dtype) as writer,
        closing(encode_pieces(pieces, options.tokenizer, dtype, options.workers)) as encoded,
    ):
        for piece, ids in encoded:
            writer.append(ids)
            length += len(ids)
            summary.bytes += int(sizes[ids].sum())
            if piece.last and length:
                writer.append(eod)
                writer.end_document()
            if piece.last:
                summary.empty += not length
                length = 0
            advance(piece.bytes_read)
        summary.documents, summary.tokens = writer.num_documents, writer.num_tokens
        if not summary.documents:
            what = f"expected text, got {summary.empty:,} empty documents in {len(files):,} files"
            raise UserError(214, what, "check --input", where=files[0])
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (command.py)."""
    parser = Parser(prog="preprocess.py", description="Turn text into a token data set.")
    add_inputs(parser)
    parser.add_argument(
        "--output", required=True, type=prefix, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="MODEL", help="from train_tokenizer.py")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # ours, else all
    parser.add_argument("--workers", type=positive, default=cores, help="processes that encode (default: all cores)")
    return run(preprocess, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
