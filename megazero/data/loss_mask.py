"""Read and write which tokens are trained on: PREFIX.mask next to PREFIX.bin, one bit for each token.

    8 bytes   "MZMASK", a zero byte, and 1, the version
    u64       T, number of tokens
    u64       xxh3 (64 bits) of what follows
    bytes     token i is bit i % 8, the lowest first, of byte i // 8: 1 if it counts in the loss as a target; the
              bits after the last token are 0                                                        [ceil(T / 8)]

Little endian. Without this file every token counts. Like the tokens, it is read in the pieces that are needed, but it
is checked as a whole when it is opened: a mask that is cut off or has a flipped bit would train on the questions.
"""

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import flush
from megazero.data.data_file import DataFile

MAGIC = b"MZMASK\x00\x01"
HEADER = struct.Struct("<8sQQ")
_BLOCK = 1 << 24  # bytes that are hashed at a time
_DO = "copy it again, or preprocess again"


def mask_path(prefix: str | Path) -> Path:
    """Return the path of the mask of a prefix, which may contain dots."""
    return Path(f"{Path(prefix)}.mask")


class LossMask:
    """A validated mask.

    Attributes:
        path: the file.
        digest: 16 hex digits of its bits.

    Raises:
        UserError: 225, it cannot be read, is damaged, or has another number of tokens.
    """

    def __init__(self, path: Path, num_tokens: int):
        self.path = path
        self._file = DataFile(path, "bits", 225, unreadable=225)
        size = self._file.size
        header = self._file.read(0, min(HEADER.size, size)).tobytes()
        magic, tokens, digest = HEADER.unpack(header) if len(header) == HEADER.size else (header, 0, 0)
        expected = (MAGIC, num_tokens, HEADER.size + -(-num_tokens // 8))
        if (magic, tokens, size) != expected:
            what = f"expected {expected[0]!r} of {num_tokens:,} tokens in {expected[2]:,} bytes, "
            raise UserError(225, f"{what}got {magic[:8]!r} of {tokens:,} in {size:,}", _DO, where=path)
        found = xxhash.xxh3_64()
        with doing(f"checking {path}", size) as progress:
            for at in range(HEADER.size, size, _BLOCK):
                found.update(self._file.read(at, min(_BLOCK, size - at)).data)
                progress.advance(_BLOCK)
        self.digest = f"{digest:016x}"
        if found.hexdigest() != self.digest:
            raise UserError(225, f"damaged: expected xxh3 {self.digest}, got {found.hexdigest()}", _DO, where=path)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return which of the tokens [start, stop) count: bool. Raises UserError 225: they cannot be read."""
        first = start // 8
        packed = self._file.read(HEADER.size + first, -(-stop // 8) - first)
        return np.unpackbits(packed, bitorder="little")[start - 8 * first : stop - 8 * first].astype(bool)


class LossMaskWriter:
    """A writer of a mask to a file that `IndexedDatasetWriter` opens and renames. Its methods raise OSError."""

    def __init__(self, file: BinaryIO):
        self._file, self._rest, self._tokens, self._hash = file, np.empty(0, bool), 0, xxhash.xxh3_64()
        file.write(bytes(HEADER.size))

    def append(self, scored: np.ndarray) -> None:
        """Add tokens, bool, True for those that count."""
        self._tokens += len(scored)
        bits = np.concatenate([self._rest, scored])
        whole = len(bits) // 8 * 8
        self._write(bits[:whole])
        self._rest = bits[whole:]

    def finish(self) -> str:
        """Complete the file, flush it to the disk, and return its digest."""
        self._write(self._rest)
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, self._tokens, self._hash.intdigest()))
        flush(self._file)
        return self._hash.hexdigest()

    def _write(self, bits: np.ndarray) -> None:
        packed = np.packbits(bits, bitorder="little").tobytes()
        self._hash.update(packed)
        self._file.write(packed)
