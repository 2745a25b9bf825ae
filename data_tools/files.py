"""Open files of text, as they are or compressed: .gz, .zst; and say what a file holds by its name."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.data.tokenizers.common import require_extra

COMPRESSED, TABLES = (".gz", ".zst"), (".parquet", ".arrow")
_BLOCK = 4096  # compressed bytes at a time: even of the densest file a block becomes some 100 MB at most


class DamagedError(OSError):
    """An error for a file that is cut off or not what its name says; `strerror` says which, as in any OSError."""

    def __init__(self, what: str):
        super().__init__(0, what)


def kind_of(path: Path) -> str:
    """Return the suffix that says what a file holds: that before .gz or .zst."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file to read its text. Raises OSError; reading in the context raises DamagedError, too.

    Raises:
        UserError: 162, the package that decompresses it is not installed.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            if path.suffix == ".zst":
                require_extra("zstandard", "text", path)
                yield io.BufferedReader(_Unpacked(_zstandard(file)), 1 << 17)
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedError(f"damaged or cut off: {error}") from error


def _zstandard(file: io.BufferedIOBase) -> Iterator[bytes]:
    """Yield what the frames of a file hold. The library's own reader does not tell a file that is cut off."""
    import zstandard

    frame = None
    try:
        while block := file.read(_BLOCK):
            while block:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                yield frame.decompress(block)
                block = b""
                if frame.eof:
                    block, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise DamagedError(f"damaged: {error}") from error
    if frame is not None:
        raise DamagedError("cut off")


class _Unpacked(io.RawIOBase):
    """A file of the bytes that an iterator yields."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not len(self._rest):
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
