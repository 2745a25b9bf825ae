"""Read what datatrove tokenizes, on which nanotron trains: X.ds with X.ds.index, X.ds.metadata and X.ds.loss.

    X.ds            ids of 16 or 32 bits, unsigned, little endian, no header
    X.ds.index      u64: the token behind which each document ends                                        [documents]
    X.ds.metadata   text: "NAME|BYTES" of the tokenizer and of an id, the number of tokens, and that number once more
                    for people. Older ones have no "|BYTES". May be missing
    X.ds.loss       a byte for each token: 1 where it counts in the loss, else 0. May be missing

Source: huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py. How many bytes an id has follows from the
index, whose last number is that of all tokens, and from the size of the tokens' file.
"""

from pathlib import Path

import numpy as np
import xxhash

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.reading import looked_up, read_file
from megazero.data.data_file import DataFile, Descriptors
from megazero.data.document_offsets import EndOffsets, held
from megazero.data.remembered import WORTH, Memory, identity_of, once
from megazero.data.token_dataset import TokenDataset

_BLOCK = 1 << 20  # documents that are checked at a time
_HASHED = 1 << 24  # bytes
_MOST_METADATA = 1 << 16  # bytes
_DO = "copy its files again, or tokenize again"


def open_datatrove(path: Path, descriptors: Descriptors | None = None) -> TokenDataset:
    """Open X.ds.

    Raises:
        UserError: 201, a file is missing; 202, 203, the index or what is written of it contradicts the tokens; 204, the
            tokens are not as many as the index says; 225, of the loss.
    """
    index = DataFile(Path(f"{path}.index"), "offsets", 203, descriptors)
    if index.size % 8:
        what = f"expected 8 bytes for each document, got {index.size:,} bytes"
        raise UserError(202, what, _DO, where=index.path)
    file = DataFile(path, "tokens", 204, descriptors)
    offsets = EndOffsets(index, 0, index.size // 8)
    dtype = _type_of(file, offsets.num_tokens)
    memory = _memory_of(index, offsets)

    def check() -> bytes:
        with doing(f"checking {index.path}", offsets.num_documents) as progress:
            for first in range(0, len(offsets), _BLOCK):
                _ = offsets[first : first + _BLOCK + 1]  # which refuses those that fall
                progress.advance(_BLOCK)
        return b""

    once(memory, "checked", check)
    _check_metadata(path, dtype, offsets.num_tokens)
    mask = _loss(path, offsets, descriptors)
    small = held(offsets, many_files=descriptors is not None)
    return TokenDataset(path, file, dtype, small, index=index, mask=mask, memory=memory)


def refuse_missing_datatrove(path: Path) -> None:
    """Refuse tokens without their index, or no tokens. Raises UserError 201."""
    for each in (path, Path(f"{path}.index")):
        if not each.exists():
            do = "give the path of a .ds file, beside which datatrove has put its .index"
            raise UserError(201, f"no such token file{looked_up(each)}", do, where=each)


def _type_of(file: DataFile, num_tokens: int) -> np.dtype:
    for kind in ("<u2", "<u4"):
        if num_tokens * np.dtype(kind).itemsize == file.size:
            return np.dtype(kind)
    what = f"expected 2 or 4 bytes for each of {num_tokens:,} tokens of its .index, got {file.size:,} bytes"
    raise UserError(204, what, _DO, where=file.path)


def _check_metadata(path: Path, dtype: np.dtype, num_tokens: int) -> None:
    """Refuse metadata of other tokens. Raises UserError 203."""
    metadata = Path(f"{path}.metadata")
    if not metadata.exists():
        return
    try:
        lines = read_file(metadata, _MOST_METADATA).decode().split("\n")
        size = lines[0].rpartition("|")[2] if "|" in lines[0] else str(dtype.itemsize)
        told = int(size), int(lines[1])
    except (OSError, ValueError, IndexError) as error:
        raise UserError(203, f"cannot be read: {error}", "take it away, or tokenize again", where=metadata) from error
    if told != (dtype.itemsize, num_tokens):
        what = f"tells of {told[1]:,} tokens of {told[0]} bytes, the files have {num_tokens:,} of {dtype.itemsize}"
        raise UserError(203, what, _DO, where=metadata)


class LossBytes:
    """Which tokens are trained on, one byte for each.

    Args:
        memory: of the file; None: it is too small for that.

    Attributes:
        digest: 16 hex digits of all bytes.

    Raises:
        UserError: 225, another number of bytes than tokens, or one that is neither 0 nor 1.
    """

    def __init__(self, file: DataFile, num_tokens: int, memory: Memory | None):
        if file.size != num_tokens:
            what = f"expected a byte for each of {num_tokens:,} tokens, got {file.size:,}"
            raise UserError(225, what, _DO, where=file.path)
        self._file = file
        self.digest = once(memory, "loss", self._hash).decode()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return which of tokens [start, stop) count: bool. Raises UserError 225: the disk does not give them."""
        return self._file.read(start, stop - start).astype(bool)

    def _hash(self) -> bytes:
        digest = xxhash.xxh3_64()
        with doing(f"checking {self._file.path}", self._file.size) as progress:
            for at in range(0, self._file.size, _HASHED):
                block = self._file.read(at, min(_HASHED, self._file.size - at))
                if block.max() > 1:
                    first = int(np.argmax(block > 1))
                    what = f"expected 0 or 1, got {block[first]} for token {at + first:,}"
                    raise UserError(225, what, _DO, where=self._file.path)
                digest.update(block.data)
                progress.advance(len(block))
        return digest.hexdigest().encode()


def _memory_of(file: DataFile, offsets: EndOffsets) -> Memory | None:
    return Memory(file.path, identity_of(file)) if offsets.num_documents >= WORTH else None


def _loss(path: Path, offsets: EndOffsets, descriptors: Descriptors | None) -> LossBytes | None:
    loss = Path(f"{path}.loss")
    if not loss.exists():
        return None
    file = DataFile(loss, "bits", 225, descriptors, unreadable=225)
    return LossBytes(file, offsets.num_tokens, _memory_of(file, offsets))
