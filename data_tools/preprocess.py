"""Turn text into a token data set, PREFIX.bin and PREFIX.idx.

    megazero preprocess --input books/ web.jsonl --tokenizer books.model --output data/books
    megazero preprocess --chat --input chats.jsonl --tokenizer llama/tokenizer.json --output data/chats

Every document is encoded and ended with the tokenizer's end-of-document id. Ids are stored as uint16 if the vocabulary
has at most 65,536 of them, else as int32. Empty documents are skipped and counted. The data set appears whole or not at
all; PREFIX.json next to it records its origin. With --chat, a record is a conversation that a template renders
(`chat.py`): the rendered text is the document, no id is added at its end, and PREFIX.mask marks the tokens of answers.

The text is checked before the first token is made: encoding takes hours where checking takes minutes. The corpus is
encoded in parts, as with --part, which are joined at the end. Finished parts are kept (`unfinished.py`): the same
command line, run again after it was killed, continues after them and writes the same bytes.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository; this folder's inspect.py would hide Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from data_tools import run_script

    run_script(__file__)  # does not return

import argparse
import time
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from data_tools.chat import Chat
from data_tools.command import Parser, add_inputs, add_output, part, positive, run
from data_tools.corpus import PIECE_BYTES, TEXT_SUFFIXES, WHOLE, Reader, find_files
from data_tools.counts import Counts
from data_tools.encoding import Encoder
from data_tools.files import TABLES, kind_of
from data_tools.merge import copy_documents
from data_tools.places import Part
from data_tools.selection import Piece, Select
from data_tools.unfinished import Unfinished
from megazero.base.answers import answer, tell
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.machine import num_cores
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.joined import open_files
from megazero.data.origin import Origin, path_of
from megazero.data.templates import open_template
from megazero.data.tokenizer import Tokenizer, open_tokenizer

PART_BYTES, MOST_PARTS = 64_000_000, 100  # bytes of corpus per part, at least; a killed command loses one part


def preprocess(options: argparse.Namespace) -> None:
    """Tokenize text files into a data set, with the options of `megazero preprocess`.

    Raises:
        UserError: 190, options that exclude each other; 208, there is no such file; 214, no text was found; the errors
            of the tokenizer and of `Unfinished`.
    """
    tokenizer = open_tokenizer(options.tokenizer)
    if options.deduplicate and options.part.of > 1:
        what = "--deduplicate would see only the documents of one part"
        raise UserError(190, what, "run it without --part", where="preprocess")
    select = _select(options, tokenizer)
    if not tokenizer.lossless:
        tell(f"{tokenizer.path}: changes text; bits per byte will count the original text's bytes")
    with doing("finding files"):
        files = _files(options)
    started, masked, counts = time.monotonic(), options.chat is not None, Counts()
    with Unfinished(options.output, _job(options, tokenizer, files, select)) as unfinished:
        _make_parts(options, tokenizer, files, select, unfinished)
        for each in unfinished.done:
            counts.add(each)
        counts.list_skipped(options.output, tell)
        if not counts.documents:
            what = f"expected text, got {counts.empty:,} empty documents "
            what += f"and {counts.rejected:,} skipped as bad " if options.skip_bad else ""
            raise UserError(214, f"{what}in {len(files):,} files", "check --input", where=files[0])
        path_of(options.output).unlink(missing_ok=True)  # it describes the token files to be replaced
        with IndexedDatasetWriter(options.output, _dtype(tokenizer), masked=masked) as writer:
            copy_documents(open_files(unfinished.folder), writer)
            if writer.num_documents != counts.documents:
                what = f"expected {counts.documents:,} documents, got {writer.num_documents:,}"
                raise UserError(208, what, "remove the folder, and run again", where=unfinished.folder)
        made = (counts.documents, counts.tokens, counts.bytes, counts.id_bytes, counts.longest, writer.mask_digest)
        Origin(tokenizer.fingerprint, tokenizer.vocab_size, *made).write(options.output)
    answer(f"{options.output}: {_report(counts, masked)}, {time.monotonic() - started:.1f} s")


def _report(counts: Counts, masked: bool) -> str:
    """Describe in words what a data set holds, and what was left out."""
    left_out = {"duplicates": counts.duplicates, "skipped as bad": counts.rejected}
    empty = f"{counts.empty:,} {'without an answer' if masked else 'empty ones'} skipped"
    empty += "".join(f", {count:,} {why}" for why, count in left_out.items() if count)
    words = f"{counts.documents:,} documents ({empty}), {counts.tokens:,} tokens, {counts.bytes:,} bytes, "
    words += f"{counts.bytes / counts.tokens:.3f} bytes per token, longest {counts.longest:,} tokens"
    if masked:
        words += f", {counts.scored:,} tokens of answers"
    if counts.cut:
        words += f"; {counts.cut:,} documents of more than {WHOLE:,} characters were encoded in parts"
    return words


def _job(options: argparse.Namespace, tokenizer: Tokenizer, files: list[Path], select: Select) -> str:
    """Return a hash of everything that the result depends on."""
    looks = [path.stat() for path in files]
    corpus = [(str(path), look.st_size, look.st_mtime_ns) for path, look in zip(files, looks, strict=True)]
    words = [corpus, tokenizer.fingerprint, select, options.part, options.skip_bad, options.deduplicate]
    words += [WHOLE, PART_BYTES]
    return xxhash.xxh3_128_hexdigest(repr(words).encode(errors="surrogateescape"))


def _select(options: argparse.Namespace, tokenizer: Tokenizer) -> Select:
    """Return the text selection for records. Raises as `open_template`, or UserError 190: --chat with two fields."""
    if options.chat is None:
        return Select(tuple(options.field or ["text"]))
    if len(fields := options.field or ["messages"]) > 1:
        raise UserError(190, "--chat takes one --field, that of the messages", "give one", where="preprocess")
    template = open_template(Path(options.chat) if options.chat else None, tokenizer)
    return Chat(tuple(fields), template=template, specials=tokenizer.specials)


def _files(options: argparse.Namespace) -> list[Path]:
    """Return the files of the corpus; with --chat, only the kinds that hold records.

    Raises UserError as `find_files` does; also 211: --chat, and a file of another kind is named.
    """
    suffixes = options.suffix
    if options.chat is not None and suffixes is TEXT_SUFFIXES:
        suffixes = [suffix for suffix in TEXT_SUFFIXES if ".jsonl" in suffix or suffix in TABLES]
    files = find_files(options.input, suffixes)
    odd = next((path for path in files if kind_of(path) not in (".jsonl", *TABLES)), None)
    if options.chat is not None and odd is not None:
        raise UserError(211, "--chat reads records: .jsonl, .parquet or .arrow", "give only those", where=odd)
    return files


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the type in which ids are stored."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 65_536 else np.int32)


def _make_parts(
    options: argparse.Namespace, tokenizer: Tokenizer, files: list[Path], select: Select, unfinished: Unfinished
) -> None:
    """Encode the unfinished parts, one after the other. Raises the errors of `Reader`, `Encoder` and the writer."""
    sizes, whole = [path.stat().st_size for path in files], not tokenizer.cuts_after_newline
    total = sum(stop - start for start, stop, _ in options.part.spans(sizes))
    parts = options.part.divided(max(1, min(MOST_PARTS, total // PART_BYTES)))
    if unfinished.done:
        done = sum(counts.documents for counts in unfinished.done)
        tell(f"{options.output}: resuming after {done:,} finished documents")
    elif not options.skip_bad:
        with doing("checking the text, MB", total // 1_000_000) as progress:  # refuses bad text before any work
            for _ in (reader := Reader(files, select, part=options.part, whole=whole)):
                progress.done = reader.bytes_read // 1_000_000
    known = {digest for counts in unfinished.done for digest in counts.digests} if options.deduplicate else None
    left, dtype = parts[len(unfinished.done) :], _dtype(tokenizer)
    with (
        Encoder(options.tokenizer, dtype, min(options.workers, 1 + total // PIECE_BYTES)) as encoder,
        doing("encoding, MB", total * len(left) // len(parts) // 1_000_000) as progress,
    ):
        before = 0
        for part in left:
            reader = Reader(files, select, part=part, known=known, whole=whole, skip_bad=options.skip_bad)
            with IndexedDatasetWriter(unfinished.prefix(), dtype, masked=options.chat is not None) as writer:
                for counts in _written(encoder.encode(reader), tokenizer, writer, end=options.chat is None):
                    reader.counts.add(counts)
                    progress.done = (before + reader.bytes_read) // 1_000_000
            before += reader.bytes_read
            unfinished.finish(reader.counts)


def _written(
    encoded: Iterator[tuple[Piece, np.ndarray]], tokenizer: Tokenizer, writer: IndexedDatasetWriter, *, end: bool
) -> Iterator[Counts]:
    """Write the documents of encoded pieces; yield the counts of each.

    Args:
        end: put the tokenizer's end-of-document id after each document.
    """
    document, sizes = Counts(), tokenizer.token_bytes()
    last = np.array([tokenizer.eod] if end else [], writer.dtype)
    for piece, ids in encoded:
        writer.append(ids, np.full(len(ids), piece.scored))
        document.tokens += len(ids)
        document.scored += piece.scored * len(ids)
        document.bytes += len(piece.text.encode()) if piece.id is None else 0
        document.id_bytes += int(sizes[ids].sum())
        document.cut = max(document.cut, piece.cut)
        if piece.last:
            document.documents, document.empty = (1, 0) if document.tokens else (0, 1)
            if document.tokens:
                writer.append(last)
                writer.end_document()
                document.tokens += len(last)
            document.longest = document.tokens
            yield document
            document = Counts()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (command.py)."""
    parser = Parser(prog="megazero preprocess", description="Turn text into a token data set.")
    add_inputs(parser)
    parser.set_defaults(field=None)
    add_output(parser)
    kinds = "model of `megazero tokenizer`, tokenizer.json, *.tiktoken or bytes"
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="FILE", help=kinds)
    each = "encoding processes (default: one per core)"
    parser.add_argument("--workers", type=positive, default=num_cores(), help=each)
    chat = "records are conversations, rendered by this template (default: the tokenizer's own); --field names "
    chat += "the list of messages (default: messages), and only answers are trained on"
    parser.add_argument("--chat", nargs="?", const="", metavar="TEMPLATE.jinja", help=chat)
    parser.add_argument("--deduplicate", action="store_true", help="leave out documents whose text occurred before")
    share = "make part K of N, for example on N hosts; `merge` joins the parts into what one host would have made"
    parser.add_argument("--part", type=part, default=Part(), metavar="K/N", help=share)
    return run(preprocess, parser, argv, "the same command resumes there")
