"""Read text of any size in bounded memory.

A corpus is a list of files. `.jsonl` holds a document per line and a table (`.parquet`, `.arrow`) one per row, in some
of its fields; any other file is one document; `.gz` and `.zst` are decompressed. A document is read as a sequence of
pieces, so that one file of 100 GB costs no more memory than a thousand small ones. A piece ends where a cut changes no
id: after a newline if the vocabulary has a newline as a token of its own, otherwise at the end of the document. A
document is cut elsewhere only after `WHOLE` characters without such a place, and that piece says so (`Piece.cut`).

Text must be UTF-8 and is passed on unchanged, except for a byte order mark at the beginning of a file. Other text is
refused, or with `skip_bad` skipped, counted and listed (`Counts`): the line of a `.jsonl`, the row of a table, or else
the whole file. With `skip_bad`, a text file is checked before its first piece is passed on, so that no part of a bad
file gets into a data set.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import BufferedIOBase
from itertools import chain, count
from pathlib import Path

import xxhash

from data_tools.counts import Counts
from data_tools.files import COMPRESSED, TABLES, DamagedError, kind_of, open_text
from data_tools.places import Part
from data_tools.selection import Piece, Select
from data_tools.tables import rows
from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.data.templates import TEMPLATE_FAULT

PIECE_BYTES = 256 * 1024  # read at a time
WHOLE = 16 * 1024 * 1024  # the most characters of a piece that has no place where a cut changes no id
LINE_BYTES = 256 * 1024 * 1024  # the longest line of a .jsonl: JSON has to be held as a whole
_SMALL_TABLE, _DENSE_TABLE = 1 << 30, 1000  # characters of text, in all and per byte of the file; above both: an attack
_TEXT = (".txt", ".md", ".py", ".jsonl")
TEXT_SUFFIXES = (*_TEXT, *TABLES, *(text + end for text in _TEXT for end in COMPRESSED))
_BOM = "\ufeff"
# Where a long text is cut, best first. No word of the published patterns (GPT-2, cl100k, o200k) spans these places. A
# tokenizer that puts a space before a text puts none before a rest of the first kind, which begins with a space.
_PLACES = (
    re.compile(r".*\S(?= \S)", re.DOTALL),  # before a single space
    re.compile(r".*[^\W_](?=[ \n\t])", re.DOTALL),  # after a word
    re.compile(r".*\S\n(?=[^\W_])", re.DOTALL),  # before a word at the beginning of a line
)


def find_files(inputs: Sequence[Path], suffixes: Sequence[str] = TEXT_SUFFIXES) -> list[Path]:
    """Return the files of a corpus: named files in the order given, folders searched for `suffixes` and sorted.

    Raises:
        UserError: 211 when a path does not exist or a folder cannot be read, 214 when there is no file at all.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            files += sorted(_walk(path, tuple(suffixes)))
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(211, f"no such file or folder{looked_up(path)}", "check --input", where=path)
    if not files:
        expected = " ".join(suffixes)
        raise UserError(214, f"expected {expected} files, found none", "check --input and --suffix", where=inputs[0])
    return files


def _walk(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    for parent, _, names in os.walk(folder, onerror=refuse):
        paths = (Path(parent, name) for name in names if name.endswith(suffixes))
        yield from (path for path in paths if path.is_file())  # a FIFO would block for ever


_TEXT_FIELD, _ALL = Select(), Part()
_ALWAYS = 2**63  # beyond the end of any file


class Reader:
    """A reader of the documents of a corpus, in order.

    Args:
        files: all files of the corpus.
        select: chooses the text of a record.
        part: the part of the files to read.
        known: hashes of documents read before, whose duplicates are left out; None: keep duplicates.
        whole: cut no document at a newline, as a cut anywhere may change ids.
        skip_bad: count bad records and leave them out; False: refuse the first one.

    Attributes:
        counts: the records left out so far, and the hashes of the documents if duplicates are left out.
        bytes_read: bytes read so far, to show progress; for compressed files and tables, the size of their text.

    Raises:
        UserError: 162, a package is missing; 211 unreadable file, 212 not UTF-8 (file and byte), 213 not the expected
            JSON (file and line).
    """

    def __init__(
        self,
        files: Sequence[Path],
        select: Select = _TEXT_FIELD,
        *,
        part: Part = _ALL,
        known: set[str] | None = None,
        whole: bool = False,
        skip_bad: bool = False,
    ):
        self._files, self._select, self._known, self._whole, self._skip_bad = files, select, known, whole, skip_bad
        self._spans = part.spans([path.stat().st_size for path in files])
        self.counts, self.bytes_read = Counts(), 0

    def __iter__(self) -> Iterator[Piece]:
        for path, (start, stop, begins) in zip(self._files, self._spans, strict=True):
            try:
                if path.suffix == ".jsonl":
                    yield from self._lines(path, start, stop)
                elif begins and kind_of(path) == ".jsonl":
                    yield from self._lines(path, 0, _ALWAYS)
                elif begins:
                    yield from self._rows(path) if path.suffix in TABLES else self._text(path)
            except DamagedError as error:
                self._refuse(_unreadable(path, error))
            except OSError as error:
                raise _unreadable(path, error) from error

    def _refuse(self, error: UserError) -> None:
        """Count a bad record if `skip_bad` is set; otherwise, or if the template is faulty, raise the error."""
        if not self._skip_bad or error.code == TEMPLATE_FAULT:
            raise error
        self.counts.skip(error)

    def _take(self, given: list[Piece]) -> Iterator[Piece]:
        """Yield the pieces of a record's document, unless it is a duplicate."""
        if self._known is None or self._is_new(piece.text for piece in given):
            *pieces, end = chain.from_iterable(map(self._cut, given or [Piece("")]))
            yield from pieces
            yield replace(end, last=True)

    def _is_new(self, blocks: Iterable[str]) -> bool:
        """Return False if a document is a duplicate, which an empty one never is; remember the document."""
        hashed, size = xxhash.xxh3_128(), 0
        for block in blocks:
            hashed.update(block.encode())
            size += len(block)
        if self._known is None or not size:
            return True
        if (digest := hashed.hexdigest()) in self._known:
            self.counts.duplicates += 1
            return False
        self._known.add(digest)
        self.counts.digests.append(digest)
        return True

    def _cut(self, whole: Piece) -> Iterator[Piece]:
        """Split a piece that is in memory into smaller ones; mark no piece as the last of its document."""
        if whole.id is not None:
            yield whole
            return
        blocks = (whole.text[start : start + PIECE_BYTES] for start in range(0, len(whole.text), PIECE_BYTES))
        for piece in _cut(blocks, self._whole):
            yield replace(piece, last=False, scored=whole.scored)

    def _text(self, path: Path) -> Iterator[Piece]:
        """Yield the pieces of a file that is one document."""
        if self._skip_bad or self._known is not None:
            try:
                with open_text(path) as file:
                    is_new = self._is_new(_blocks(file, path))
            except UserError as error:
                self._refuse(error)
                return
            if not is_new:
                return
        with open_text(path) as file:
            for piece in _cut(_blocks(file, path), self._whole):
                self.bytes_read += len(piece.text.encode())
                yield piece

    def _lines(self, path: Path, start: int, stop: int) -> Iterator[Piece]:
        """Yield the documents of the JSON lines that begin at bytes [start, stop) of a file."""
        with open_text(path) as file:
            offset = start
            if start:
                file.seek(start - 1)
                offset += _skip_rest_of_line(file, b"") - 1
            for number in count(1):
                if offset >= stop or not (line := file.readline(LINE_BYTES + 1)):
                    return
                size, where = len(line), f"{path}, byte {offset:,}" if start else f"{path}:{number}"
                try:
                    if (text := _text_of(line, where, offset)).strip():
                        refuse = _refuser(where)
                        yield from self._take(self._select.pieces(_parsed(text, refuse), refuse))
                except UserError as error:
                    self._refuse(error)
                if size > LINE_BYTES and not line.endswith(b"\n"):  # the rest of it is not a line
                    size += _skip_rest_of_line(file, line)
                offset += size
                self.bytes_read += size

    def _rows(self, path: Path) -> Iterator[Piece]:
        """Yield the documents of the rows of a table. Raises DamagedError: the text is too large for the file."""
        text, most = 0, max(_SMALL_TABLE, _DENSE_TABLE * path.stat().st_size)
        for number, row in enumerate(rows(path, self._select), start=1):
            refuse = _refuser(f"{path}, row {number}")
            try:
                if isinstance(row, Exception):
                    raise refuse(f"cannot be read: {row}")
                pieces = self._select.pieces(row, refuse)
            except (UserError, UnicodeDecodeError) as error:
                self._refuse(error if isinstance(error, UserError) else refuse(f"cannot be read: {error}"))
                continue
            size = sum(len(piece.text) for piece in pieces)
            self.bytes_read += size
            text += size
            if text > most:
                raise DamagedError(f"expands to more than {most:,} characters of text")
            yield from self._take(pieces)


def _blocks(file: BufferedIOBase, path: Path) -> Iterator[str]:
    """Yield the text of a file in blocks, without a byte order mark. Raises UserError 212: it is not UTF-8."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    block = b"\0"
    while block:
        block, pending = file.read(PIECE_BYTES), len(decoder.getstate()[0])  # bytes of a character that was cut
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, path, offset - pending) from error
        yield text if offset else text.removeprefix(_BOM)
        offset += len(block)


def _cut(blocks: Iterable[str], whole: bool) -> Iterator[Piece]:
    """Cut a text into pieces after newlines; with `whole`, only where it is too long."""
    rest = ""
    for block in blocks:
        rest += block
        if not whole and (end := rest.rfind("\n", len(rest) - len(block)) + 1):
            yield Piece(rest[:end])
            rest = rest[end:]
        while len(rest) > WHOLE:
            places = (place.match(rest, WHOLE - PIECE_BYTES, WHOLE + 1) for place in _PLACES)
            end = next((found.end() for found in places if found), WHOLE)
            yield Piece(rest[:end], cut=True)
            rest = rest[end:]
    yield Piece(rest, last=True)


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(211, f"cannot be read: {error.strerror}", "check --input", where=path)


def _not_utf8(error: UnicodeDecodeError, where: Path | str, offset: int) -> UserError:
    """Return the error for bytes at `offset` of a file that are not UTF-8."""
    what = f"byte {offset + error.start:,} (0x{error.object[error.start]:02x}) is not UTF-8: {error.reason}"
    return UserError(212, what, "convert the file, for example with iconv, or give --skip-bad", where=where)


def _refuser(where: str) -> Callable[[str], UserError]:
    return lambda what: UserError(213, what, "repair it, choose another --field, or give --skip-bad", where=where)


def _skip_rest_of_line(file: BufferedIOBase, line: bytes) -> int:
    """Read to the end of a line whose first bytes, `line`, have been read; return the number of bytes read here."""
    skipped = 0
    while not line.endswith(b"\n") and (line := file.readline(LINE_BYTES)):
        skipped += len(line)
    return skipped


def _text_of(line: bytes, where: str, offset: int) -> str:
    """Decode a line at byte `offset` of its file, without a byte order mark; raise UserError: too long or not UTF-8."""
    if len(line) > LINE_BYTES:
        raise _refuser(where)(f"expected a line of at most {LINE_BYTES:,} bytes, got more")
    try:
        return line.decode() if offset else line.decode().removeprefix(_BOM)
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where, offset) from error


def _parsed(text: str, refuse: Callable[[str], UserError]) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"not JSON: {error}") from error
