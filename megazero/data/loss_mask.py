"""Say which tokens are trained on: PREFIX.mask beside PREFIX.bin, one bit for each token.

    8 bytes   "MZMASK", a zero byte, and 1, the version
    u64       T, number of tokens
    u64       xxh3 (64 bits) of what follows
    bytes     token i is bit i % 8, the lowest first, of byte i // 8: 1 where it counts in the loss as a target; the
              bits behind the last token are 0                                                        [ceil(T / 8)]

Little endian. Of token files without such a file every token counts. It is read where it is needed, like the tokens,
but once as a whole when it is opened (a large one: the first time, remembered.py): a mask that is cut off or has a
flipped bit would train on the questions.
"""

import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from megazero.base.atomic import write_error
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import flush
from megazero.data.data_file import DataFile, Descriptors

MAGIC = b"MZMASK\x00\x01"
HEADER = struct.Struct("<8sQQ")
_BLOCK = 1 << 24  # bytes that are hashed at a time
_DO = "copy it again, or preprocess again"


def mask_path(prefix: str | Path) -> Path:
    """Return the file's path, of a prefix that may contain dots."""
    return Path(f"{Path(prefix)}.mask")


class LossMask:
    """A validated mask.

    Attributes:
        path: the file.
        digest: 16 hex digits of its bits.

    Raises:
        UserError: 225, it cannot be read, is damaged, or is of another number of tokens.
    """

    def __init__(self, path: Path, num_tokens: int, descriptors: Descriptors | None = None):
        self.path = path
        self._file = DataFile(path, "bits", 225, descriptors, unreadable=225)
        size = self._file.size
        header = self._file.read(0, min(HEADER.size, size)).tobytes()
        magic, tokens, expected = HEADER.unpack(header) if len(header) == HEADER.size else (header, 0, 0)
        if magic != MAGIC:
            raise UserError(225, f"expected a mask that begins with {MAGIC!r}, got {magic[:8]!r}", _DO, where=path)
        if tokens != num_tokens or size != HEADER.size + -(-num_tokens // 8):
            what = f"expected {HEADER.size + -(-num_tokens // 8):,} bytes for {num_tokens:,} tokens, "
            raise UserError(225, f"{what}got {size:,} bytes for {tokens:,}", _DO, where=path)
        found = self._hash(size)
        if found != expected:
            raise UserError(225, f"expected xxh3 {expected:016x}, got {found:016x}", _DO, where=path)
        self.digest = f"{expected:016x}"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return which of tokens [start, stop) count: bool. Raises UserError 225: the disk does not give them."""
        first = start // 8
        packed = self._file.read(HEADER.size + first, -(-stop // 8) - first)
        return np.unpackbits(packed, bitorder="little")[start - 8 * first : stop - 8 * first].astype(bool)

    def _hash(self, size: int) -> int:
        digest = xxhash.xxh3_64()
        with doing(f"checking {self.path}", size) as progress:
            for at in range(HEADER.size, size, _BLOCK):
                digest.update(self._file.read(at, min(_BLOCK, size - at)).data)
                progress.advance(_BLOCK)
        return digest.intdigest()


def open_mask(prefix: str | Path, num_tokens: int, descriptors: Descriptors | None = None) -> LossMask | None:
    """Return the mask of token files; None: they have none. Raises UserError 225."""
    path = mask_path(prefix)
    return LossMask(path, num_tokens, descriptors) if path.exists() else None


class LossMaskWriter:
    """A writer of a whole mask to a path of its own, which `IndexedDatasetWriter` renames.

        with LossMaskWriter(path) as writer:
            writer.append(scored)          # bool [n], any number of times

    Attributes:
        digest: once it is written.

    Raises:
        UserError: 208, the system refuses to write.
    """

    def __init__(self, path: Path):
        self.path, self.digest = path, ""
        self._rest, self._tokens, self._hash = np.empty(0, bool), 0, xxhash.xxh3_64()

    def __enter__(self) -> "LossMaskWriter":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
            self._file.write(bytes(HEADER.size))
        except OSError as error:
            raise write_error(self.path, error) from error
        return self

    def append(self, scored: np.ndarray) -> None:
        """Add tokens, True where they count."""
        self._tokens += len(scored)
        bits = np.concatenate([self._rest, scored])
        whole = len(bits) // 8 * 8
        self._write(bits[:whole])
        self._rest = bits[whole:]

    def _write(self, bits: np.ndarray) -> None:
        packed = np.packbits(bits, bitorder="little").tobytes()
        self._hash.update(packed)
        try:
            self._file.write(packed)
        except OSError as error:
            raise write_error(self.path, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is not None:
                return
            self._write(self._rest)
            try:
                self._file.seek(0)
                self._file.write(HEADER.pack(MAGIC, self._tokens, self._hash.intdigest()))
                flush(self._file)
            except OSError as error_:
                raise write_error(self.path, error_) from error_
        self.digest = self._hash.hexdigest()
