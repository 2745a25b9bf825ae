"""Turn text into a token data set, PREFIX.bin and PREFIX.idx.

    megazero preprocess --input books/ web.jsonl --tokenizer books.model --output data/books
    megazero preprocess --chat --input chats.jsonl --tokenizer llama/tokenizer.json --output data/chats

Every document is encoded and ended with the tokenizer's end-of-document id. Ids are stored as uint16 where the
vocabulary has at most 65,536 of them, else as int32. Empty documents are skipped and counted. The data set appears
whole or not at all; PREFIX.json beside it says what it was made of. With --chat a record is a conversation that a
template renders (`chat.py`): the document is what it renders, nothing is put behind it, and PREFIX.mask says which
tokens are answers.

The text is checked before the first token is made: encoding takes hours where checking takes minutes. What is done is
kept (`unfinished.py`): the same line, run again after it was killed, goes on where it was and gives the same bytes.
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
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from data_tools.chat import Chat
from data_tools.command import Parser, add_inputs, add_output, part, positive, run
from data_tools.corpus import TEXT_SUFFIXES, WHOLE, Known, Piece, Reader, check_files, find_files
from data_tools.encoding import encode_pieces
from data_tools.files import TABLES, kind_of
from data_tools.places import Part
from data_tools.selection import Select, Taken
from data_tools.skipped import Skipped
from data_tools.templates import open_template
from data_tools.unfinished import State, Unfinished
from megazero.base.answers import tell
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.heartbeat import HEART
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.origin import Origin, path_of
from megazero.data.tokenizer import Tokenizer, open_tokenizer


def preprocess(options: argparse.Namespace) -> None:
    tokenizer = open_tokenizer(options.tokenizer)
    if options.deduplicate and options.part.of > 1:
        what = "--deduplicate sees the documents of one part alone"
        raise UserError(190, what, "run it without --part", where="preprocess")
    select = _select(options, tokenizer)
    if not tokenizer.lossless:
        tell(f"{tokenizer.path}: changes text; bits per byte will be of the text's own bytes")
    with doing("finding files"):
        files = _files(options)
    started = time.monotonic()
    skipped = Skipped() if options.skip_bad else None
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 65_536 else np.int32)
    job, masked = _job(options, tokenizer, files, select), options.chat is not None
    with Unfinished(options.output, job, dtype.itemsize, masked=masked) as unfinished:
        if unfinished.goes_on:
            tell(f"{options.output}: going on behind {unfinished.state.documents:,} documents that are done")
            if skipped is not None:
                skipped.lines, skipped.count = unfinished.state.rejected, unfinished.state.mark.rejected
        try:
            _write(options, tokenizer, files, select, skipped, unfinished, dtype)
        except BaseException:
            unfinished.leave(skipped)
            raise
        state = unfinished.state
        unfinished.remove()
    (skipped or Skipped()).tell(options.output, tell)
    with HEART.paused():
        print(f"{options.output}: {_report(state, masked)}, {time.monotonic() - started:.1f} s")


def _report(state: State, masked: bool) -> str:
    """Return what went into a data set, and what was left out, in words."""
    mark = state.mark
    left_out = {"did not pass": mark.filtered, "duplicates": mark.duplicates, "skipped as bad": mark.rejected}
    words = f"{state.documents:,} documents ({state.empty:,} {'without an answer' if masked else 'empty ones'} skipped"
    words += "".join(f", {count:,} {why}" for why, count in left_out.items() if count)
    words += f"), {state.tokens:,} tokens, {state.bytes:,} bytes, {state.bytes / state.tokens:.3f} bytes per token, "
    words += f"longest {state.longest:,} tokens"
    if masked:
        words += f", {state.scored:,} tokens of answers"
    if state.cut:
        words += f"; {state.cut:,} documents of more than {WHOLE:,} characters were encoded in parts"
    return words


def _job(options: argparse.Namespace, tokenizer: Tokenizer, files: list[Path], select: Taken) -> str:
    """Return all that the result depends on, in words."""
    looks = [path.stat() for path in files]
    corpus = [(str(path), look.st_size, look.st_mtime_ns) for path, look in zip(files, looks, strict=True)]
    words = [corpus, tokenizer.fingerprint, str(select), str(options.part)]
    words += [options.skip_bad, options.deduplicate, WHOLE]
    return xxhash.xxh3_128_hexdigest(repr(words).encode(errors="surrogateescape"))


def _select(options: argparse.Namespace, tokenizer: Tokenizer) -> Taken:
    """Return what is taken of records. Raises UserError: 162, 226, a template that cannot be had."""
    where = tuple(options.where)
    if options.chat is None:
        return Select(tuple(options.field or ["text"]), where)
    if len(fields := options.field or ["messages"]) > 1:
        raise UserError(190, "--chat takes one --field, that of the messages", "give one", where="preprocess")
    return Chat(open_template(options.chat or None, tokenizer), tokenizer.specials, fields[0], where)


def _files(options: argparse.Namespace) -> list[Path]:
    """Return the files of the corpus; of conversations those with records. Raises UserError 211, 214."""
    suffixes = options.suffix
    if options.chat is not None and suffixes is TEXT_SUFFIXES:
        suffixes = [suffix for suffix in TEXT_SUFFIXES if ".jsonl" in suffix or suffix in TABLES]
    files = find_files(options.input, suffixes)
    odd = next((path for path in files if kind_of(path) not in (".jsonl", *TABLES)), None)
    if options.chat is not None and odd is not None:
        raise UserError(211, "--chat reads records: .jsonl, .parquet or .arrow", "name others in --input", where=odd)
    return files


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show how far the work is; yield what is called with the bytes that were done."""
    done = 0
    began = time.monotonic()
    with doing("encoding, MB", total // 1_000_000) as beat:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            beat.done = done // 1_000_000
            beat.detail = _left(done, total, time.monotonic() - began)

        yield advance


def _left(done: int, total: int, seconds: float) -> str:
    """Return an estimate of the time that is left, in words; "" as long as there is little to say it by."""
    if seconds < 5 or done >= total or not done:
        return ""
    left = seconds * (total - done) / done
    return f"({left / 3600:.1f} h left)" if left >= 3600 else f"({left / 60:.0f} min left)"


def _write(
    options: argparse.Namespace,
    tokenizer: Tokenizer,
    files: list[Path],
    select: Taken,
    skipped: Skipped | None,
    unfinished: Unfinished,
    dtype: np.dtype,
) -> None:
    """Encode what is not done yet, and write the token files. Raises UserError."""
    start, masked = unfinished.state.mark, unfinished.mask is not None
    how = {"part": options.part, "whole": not tokenizer.cuts_after_newline}
    spans = options.part.spans([path.stat().st_size for path in files])
    total = sum(span.stop - span.start for span in spans)
    if skipped is None and not unfinished.goes_on:
        check_files(Reader(files, select, **how), total)
    known = Known(unfinished.digests()) if options.deduplicate else None
    pieces = Reader(files, select, skipped, known=known, start=start, **how)
    end, sizes = np.array([] if masked else [tokenizer.eod], dtype), tokenizer.token_bytes()
    path_of(options.output).unlink(missing_ok=True)  # of token files that are replaced
    done = {"kept": unfinished.tokens, "lengths": unfinished.lengths(), "mask": unfinished.mask}
    with IndexedDatasetWriter(options.output, dtype, **done) as writer:
        left = total - sum(span.stop - span.start for span in spans[: start.file])
        with (
            _progress(left) as advance,
            closing(encode_pieces(pieces, options.tokenizer, dtype, options.workers)) as encoded,
        ):
            document = _Document()
            for piece, ids in encoded:
                writer.append(ids)
                unfinished.score(len(ids), piece.scored)
                document.add(piece, ids, sizes)
                if piece.last:
                    if document.tokens:
                        writer.append(end)
                        writer.end_document()
                        document.tokens += len(end)
                        unfinished.add(document.tokens, piece.digest)
                    unfinished.state = _behind(unfinished.state, piece, document)
                    document = _Document()
                    if unfinished.is_due():
                        writer.flush()
                        unfinished.save(skipped)
                advance(piece.bytes_read)
        unfinished.state = replace(unfinished.state, mark=pieces.end())
        if not writer.num_documents:
            what = f"expected text, got {unfinished.state.empty:,} empty documents "
            if skipped is not None:
                skipped.tell(options.output, tell)
                what += f"and {skipped.count:,} skipped as bad "
            what += f"in {len(files):,} files"
            raise UserError(214, what, "check --input", where=files[0])
        digest = unfinished.write_mask()
    state = unfinished.state
    origin = (state.documents, state.tokens, state.bytes, state.id_bytes, state.longest, digest)
    Origin(tokenizer.fingerprint, tokenizer.vocab_size, *origin).write(options.output)


@dataclass
class _Document:
    """The counts of a document, as in `State`."""

    tokens: int = 0
    scored: int = 0
    bytes: int = 0
    id_bytes: int = 0
    cut: bool = False

    def add(self, piece: Piece, ids: np.ndarray, sizes: np.ndarray) -> None:
        """Count one more piece."""
        self.tokens += len(ids)
        self.scored += piece.scored * len(ids)
        self.bytes += len(piece.text.encode()) if piece.id is None else 0
        self.id_bytes += int(sizes[ids].sum())
        self.cut |= piece.cut


def _behind(state: State, piece: Piece, document: _Document) -> State:
    """Return the state behind a document with such counts; one without a token is left out."""
    assert piece.mark is not None, "the last piece of a document"
    if not document.tokens:
        return replace(state, mark=piece.mark, empty=state.empty + 1, bytes=state.bytes + document.bytes)
    return replace(
        state,
        mark=piece.mark,
        documents=state.documents + 1,
        tokens=state.tokens + document.tokens,
        scored=state.scored + document.scored,
        bytes=state.bytes + document.bytes,
        id_bytes=state.id_bytes + document.id_bytes,
        longest=max(state.longest, document.tokens),
        cut=state.cut + document.cut,
    )


def _template(text: str) -> Path | str:
    """Return the value of --chat: a file, or "" where none is given."""
    return Path(text) if text else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (command.py)."""
    parser = Parser(prog="megazero preprocess", description="Turn text into a token data set.")
    add_inputs(parser)
    parser.set_defaults(field=None)
    add_output(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=Path,
        metavar="FILE",
        help="of `megazero tokenizer`; tokenizer.json, *.tiktoken, bytes",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # ours, else all
    parser.add_argument("--workers", type=positive, default=cores, help="processes that encode (default: all cores)")
    chat = "records are conversations, rendered by this template (default: the tokenizer's own); --field names "
    chat += "the list of messages (default: messages), and answers alone are trained on"
    parser.add_argument("--chat", nargs="?", const="", type=_template, metavar="TEMPLATE.jinja", help=chat)
    once = "leave out documents whose text has been there before"
    parser.add_argument("--deduplicate", action="store_true", help=once)
    share = "make part K of N, as on N hosts; `merge` joins the parts to what one host would have made"
    parser.add_argument("--part", type=part, default=Part(), metavar="K/N", help=share)
    return run(preprocess, parser, argv, "the same line goes on where it was")


if __name__ == "__main__":
    sys.exit(main())
