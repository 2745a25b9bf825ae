"""Read token files of other projects, which `merge.py` copies into our format: training reads that format alone.

    X.ds    datatrove's, on which nanotron trains. X.ds has ids of 16 or 32 bits; X.ds.index the token at which each
            document ends, u64; X.ds.loss (it may be missing) a byte for each token, 1 where it counts in the loss.
    X.npy   OLMo-core's and Dolma's: raw ids in spite of the name, of the smallest unsigned type that holds the
            tokenizer's ids. A file that numpy has written is read as well.
    X.bin   without an index: nanoGPT's (raw ids of 16 bits) or llm.c's, which begins with 256 int32: 20240520, 1 (ids
            of 16 bits) or 20240801, 7 (of 32 bits), then the number of ids.

All are little endian. In the last two kinds a document ends with the end-of-document id; ids after the last one are a
document too. (In llm.c's files that id begins a document.)

Sources: huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py; allenai/OLMo-core,
src/olmo_core/data/utils.py; karpathy/nanoGPT, data/openwebtext/prepare.py; karpathy/llm.c, dev/data/data_common.py.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.data.data_file import DataFile
from megazero.data.token_dataset import HeldOffsets, TokenDataset

_LLM_C, _LLM_C_BYTES = struct.Struct("<3i"), 1024
_LLM_C_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_BLOCK = 1 << 22  # tokens that are read at a time


class Vocabulary(NamedTuple):
    """The facts of a tokenizer that files of ids alone do not have: ids are in [0, size), `eod` ends a document."""

    size: int
    eod: int


def is_foreign(path: Path) -> bool:
    """Return whether a path names files of another project; a missing X.bin means the prefix X."""
    if Path(f"{path}.idx").exists():
        return False
    return path.suffix in (".ds", ".npy") or (path.suffix == ".bin" and path.exists())


def open_foreign(path: Path, vocabulary: Vocabulary | None) -> TokenDataset:
    """Open token files of another project; the ends of all documents are held in memory, 8 bytes each.

    Args:
        vocabulary: of the tokenizer that the files were made with; None: it is not known.

    Raises:
        UserError: 201, a file is missing, or half of a pair; 202, no header of numpy; 204, files contradict each other;
            222, the vocabulary is needed; 223, the ids are not of it; 225, a wrong loss.
    """
    if not path.exists():
        raise UserError(201, f"no such token file{looked_up(path)}", "give a file of token ids", where=path)
    if path.suffix == ".ds":
        return _open_datatrove(path)
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        what = f"is half of a pair: {path.with_suffix('.idx').name} is next to it"
        raise UserError(201, what, f"give the prefix {path.with_suffix('')}", where=path)
    if vocabulary is None:
        what = f"nothing says which id ends a document: a {path.suffix} file has ids alone"
        raise UserError(222, what, "give the tokenizer that it was made with (--tokenizer)", where=path)
    return _open_headerless(path, vocabulary)


def _open_datatrove(path: Path) -> TokenDataset:
    file, ends = DataFile(path, "tokens", 204), DataFile(Path(f"{path}.index"), "offsets", 204)
    offsets = np.concatenate([[0], ends.read(0, ends.size // 8 * 8).view("<i8")])
    count = int(offsets[-1])
    if ends.size % 8 or (np.diff(offsets) < 0).any() or file.size not in (2 * count, 4 * count):
        what = f"expected 8 bytes for each document, with rising ends, in {ends.path.name}, and 2 or 4 for each of "
        what += f"{count:,} tokens, got {ends.size:,} and {file.size:,} bytes"
        raise UserError(204, what, "copy its files again, or tokenize again", where=path)
    dtype, loss = np.dtype("<u4" if count and file.size == 4 * count else "<u2"), Path(f"{path}.loss")
    mask = _LossBytes(loss, count) if loss.exists() else None
    return TokenDataset(path, file, dtype, HeldOffsets(offsets), mask=mask)


class _LossBytes:
    """A mask of one byte for each token.

    Raises:
        UserError: 225, another number of bytes than tokens, or one that is neither 0 nor 1.
    """

    def __init__(self, path: Path, num_tokens: int):
        self._file, digest = DataFile(path, "bits", 225, unreadable=225), xxhash.xxh3_64()
        wrong = self._file.size != num_tokens
        for at in range(0, self._file.size, _BLOCK):
            block = self._file.read(at, min(_BLOCK, self._file.size - at))
            wrong |= bool(block.max() > 1)
            digest.update(block.data)
        if wrong:
            what = (
                f"expected a byte of 0 or 1 for each of {num_tokens:,} tokens, got {self._file.size:,} bytes or others"
            )
            raise UserError(225, what, "copy it again, or tokenize again", where=path)
        self.digest = digest.hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return which of tokens [start, stop) count: bool. Raises UserError 225: the disk does not give them."""
        return self._file.read(start, stop - start).astype(bool)


def _open_headerless(path: Path, vocabulary: Vocabulary) -> TokenDataset:
    file = DataFile(path, "tokens", 204)
    dtype, at, count = (_npy_layout if path.suffix == ".npy" else _bin_layout)(file, vocabulary.size)
    count = (file.size - at) // dtype.itemsize if count is None else count
    if at + count * dtype.itemsize != file.size:
        what = f"expected {count:,} {dtype} tokens after byte {at:,}, got {file.size - at:,} bytes"
        raise UserError(204, what, "copy it again, or give the tokenizer that it was made with", where=path)
    ids, ends = TokenDataset(path, file, dtype, HeldOffsets(np.array([0, count])), at=at), [np.zeros(1, np.int64)]
    for first in range(0, count, _BLOCK):
        block = ids.read(first, min(first + _BLOCK, count))
        if first == 0 and len(block) >= 16 and dtype.itemsize < 8 and block.any() and not block[1::2].any():
            bits = 8 * dtype.itemsize
            what = f"expected ids of {bits} bits by the tokenizer, got 0 for every second one: they have {2 * bits}"
            raise UserError(223, what, "give the tokenizer that it was made with (--tokenizer)", where=path)
        ends.append(np.flatnonzero(block == vocabulary.eod) + (first + 1))
    offsets = np.concatenate(ends)
    if offsets[-1] != count:
        offsets = np.append(offsets, count)
    return TokenDataset(path, file, dtype, HeldOffsets(offsets), at=at)


def _npy_layout(file: DataFile, vocab: int) -> tuple[np.dtype, int, int | None]:
    """Return the type of the ids, the byte of the first, and their number as the header says it; None: it does not."""
    if file.read(0, min(6, file.size)).tobytes() != np.lib.format.MAGIC_PREFIX:
        kind = next(kind for kind in ("<u1", "<u2", "<u4", "<u8") if vocab - 1 <= np.iinfo(kind).max)
        return np.dtype(kind), 0, None
    try:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, OSError) as error:
        do = "write it again with numpy.save"
        raise UserError(202, f"expected a whole file of numpy: {error}", do, where=file.path) from error
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.newbyteorder("<") != array.dtype:
        what = f"expected one row of integers, little endian, got {array.dtype} of shape {array.shape}"
        raise UserError(202, what, "write it again with numpy.save of one array of ids", where=file.path)
    return array.dtype, array.offset, array.size


def _bin_layout(file: DataFile, vocab: int) -> tuple[np.dtype, int, int | None]:
    """Return what `_npy_layout` returns, of a .bin without an index."""
    if file.size >= _LLM_C_BYTES:
        magic, version, count = _LLM_C.unpack(file.read(0, _LLM_C.size).tobytes())
        if (magic, version) in _LLM_C_KINDS:
            return np.dtype(_LLM_C_KINDS[magic, version]), _LLM_C_BYTES, count
    if vocab > 1 << 16:
        what = f"expected ids of 16 bits in a .bin without an index, got a tokenizer of {vocab:,} ids"
        do = "rename it .npy if it is raw ids of 32 bits, or give the prefix of a .bin and .idx"
        raise UserError(223, what, do, where=file.path)
    return np.dtype("<u2"), 0, None
