"""Read text, whatever its size, in bounded memory.

A corpus is a list of files. `.jsonl` holds a document per line, under one key; any other file is one document. Every
document comes as a run of pieces of at most a quarter of a megabyte, cut after a line end where there is one, so that
one file of 100 GB costs no more memory than a thousand small ones. A newline is a token of its own in our vocabularies,
hence cutting after one changes no token.

Text must be UTF-8 and is passed on unchanged; the only thing ever dropped is a byte order mark before JSON. Other text
is refused, or where the user has asked for that skipped, counted and listed (`Skipped`): the whole file, or of a
`.jsonl` the line. A file is checked before its first piece is passed on, so that no part of a bad file gets into a data
set.
"""

import codecs
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from megazero.base.atomic import write_atomically
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.reading import looked_up

PIECE_BYTES = 256 * 1024
LINE_BYTES = 256 * 1024 * 1024  # JSON has to be held as a whole: a bound on one document of a .jsonl
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")


@dataclass(frozen=True)
class Piece:
    """A part of a document.

    Attributes:
        text: at most PIECE_BYTES of UTF-8; the last piece of a document may be empty.
        last: it ends its document.
        bytes_read: how much of the file was read for it, to show progress.
    """

    text: str
    last: bool
    bytes_read: int


_LISTED, _SHOWN = 10_000, 5  # in the file, and on standard error


@dataclass
class Skipped:
    """The files and lines that were skipped of a corpus.

    Attributes:
        count: number of files and lines.
        lines: the reasons, for the first ones.
    """

    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, error: UserError) -> None:
        """Count one more file or line that is bad."""
        self.count += 1
        if len(self.lines) < _LISTED:
            self.lines.append(f"{error.where}: {error.what}")

    def tell(self, output: Path, say: Callable[[str], object]) -> None:
        """Say what was skipped, and leave the list beside the output; no list where nothing was.

        Raises:
            UserError: 208, the list cannot be written.
        """
        path = output.with_name(output.name + ".skipped.txt")
        if not self.count:
            path.unlink(missing_ok=True)  # of an earlier run
            return
        more = [f"... and {self.count - len(self.lines):,} more"] if self.count > len(self.lines) else []
        write_atomically(path, "".join(f"{line}\n" for line in (*self.lines, *more)).encode(errors="backslashreplace"))
        for line in self.lines[:_SHOWN]:
            say(f"skipped {line}")
        say(f"skipped {self.count:,} in all, which are listed in {path}")


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


def read_pieces(files: Sequence[Path], key: str, skipped: Skipped | None = None) -> Iterator[Piece]:
    """Yield all documents of the files, in order.

    Args:
        skipped: takes what is bad; None: that is refused.

    Raises:
        UserError: 211 unreadable file, 212 not UTF-8 (file and byte), 213 not the expected JSON (file and line).
    """
    for path in files:
        try:
            yield from _json_lines(path, key, skipped) if path.suffix == ".jsonl" else _text(path, skipped)
        except OSError as error:
            raise _unreadable(path, error) from error


def check_files(files: Sequence[Path], key: str) -> None:
    """Check all files, so that a bad one is refused before any work is done. Raises as `read_pieces`."""
    total = sum(path.stat().st_size for path in files)
    with doing("checking the text, MB", total // 1_000_000) as progress:
        read = 0
        for path in files:
            try:
                if path.suffix == ".jsonl":
                    for piece in _json_lines(path, key, None):
                        read += piece.bytes_read
                        progress.done = read // 1_000_000
                    continue
                with path.open("rb") as file:
                    for size in _checked(file, path):
                        read += size
                        progress.done = read // 1_000_000
            except OSError as error:
                raise _unreadable(path, error) from error


def _checked(file: BinaryIO, path: Path) -> Iterator[int]:
    """Yield the sizes of blocks of a file of text. Raises UserError 212: not UTF-8."""
    decoder, offset, pending = codecs.getincrementaldecoder("utf-8")(), 0, 0
    while True:
        block = file.read(PIECE_BYTES)
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, path, offset - pending) from error
        if not block:
            return
        offset += len(block)
        pending = len(decoder.getstate()[0])  # of a character that the next block goes on with
        yield len(block)


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(211, f"cannot be read: {error.strerror}", "check --input", where=path)


def _text(path: Path, skipped: Skipped | None) -> Iterator[Piece]:
    with path.open("rb") as file:
        if skipped is not None:
            try:
                for _ in _checked(file, path):
                    pass
            except UserError as error:
                skipped.add(error)
                return
            file.seek(0)
        rest, offset = b"", 0
        while block := file.read(PIECE_BYTES - len(rest)):
            data = rest + block
            cut = data.rfind(b"\n") + 1 or _character_end(data)
            rest = data[cut:]
            yield Piece(_decode(data[:cut], path, offset), last=False, bytes_read=cut)
            offset += cut
        yield Piece(_decode(rest, path, offset), last=True, bytes_read=len(rest))


def _character_end(data: bytes) -> int:
    """Return where the last complete character of UTF-8 ends; the end of the data when its tail is no UTF-8 anyway."""
    for back in range(1, min(4, len(data) - 1) + 1):
        if data[-back] >= 0xC0:  # the first byte of a character of 2 to 4 bytes, which may be cut
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(error, path, offset) from error


def _not_utf8(error: UnicodeDecodeError, path: Path, offset: int) -> UserError:
    """Return the error of bytes that begin at `offset` of a file and are not UTF-8."""
    what = f"byte {offset + error.start:,} (0x{error.object[error.start]:02x}) is not UTF-8: {error.reason}"
    return UserError(212, what, "convert the file, for example with iconv, or give --skip-bad", where=path)


def _json_lines(path: Path, key: str, skipped: Skipped | None) -> Iterator[Piece]:
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
            text, size = None, len(line)
            try:
                text = _json_text(line, path, number, offset, key)
            except UserError as error:
                if skipped is None:
                    raise
                skipped.add(UserError(error.code, error.what, "", where=f"{path}:{number}"))
                while len(line) > LINE_BYTES and not line.endswith(b"\n"):  # the rest of it is no line
                    line = file.readline(LINE_BYTES + 1)
                    size += len(line)
            if text is not None:
                yield from _cut(text, size)
            offset += size


def _json_text(line: bytes, path: Path, number: int, offset: int, key: str) -> str | None:
    """Return the document of a line; None for a blank line."""

    def refuse(what: str) -> UserError:
        return UserError(213, what, "mend the line, choose another --key, or give --skip-bad", where=f"{path}:{number}")

    if len(line) > LINE_BYTES:
        raise refuse(f"expected a line of at most {LINE_BYTES:,} bytes, got more")
    content = _decode(line, path, offset)
    if number == 1:
        content = content.removeprefix("\ufeff")
    if not content.strip():
        return None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refuse(f"not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        if isinstance(record, dict):
            got = f"{type(record[key]).__name__} there" if key in record else f"keys {', '.join(record)[:60]}"
        else:
            got = f"{type(record).__name__}"
        raise refuse(f'expected an object with text under "{key}", got {got}')
    text = record[key]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refuse(f"character {error.start:,} of the text is half a surrogate pair, not a character") from error
    return text


def _cut(text: str, line_bytes: int) -> Iterator[Piece]:
    """Yield a document that is in memory as a whole, in pieces; the last one carries the bytes of the line."""
    size = PIECE_BYTES // 4  # characters, of at most 4 bytes
    start = 0
    while len(text) - start > size:
        stop = text.rfind("\n", start, start + size) + 1 or start + size
        yield Piece(text[start:stop], last=False, bytes_read=0)
        start = stop
    yield Piece(text[start:], last=True, bytes_read=line_bytes)
