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

import io
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.data.data_file import DataFile
from megazero.data.document_offsets import HeldOffsets
from megazero.data.token_dataset import TokenDataset

_NPY = b"\x93NUMPY"
_LLM_C, _LLM_C_BYTES = struct.Struct("<3i"), 1024
_LLM_C_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_BLOCK = 1 << 22  # tokens that are read at a time
_MOST_HEADER = 1 << 16  # bytes of numpy's


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
        UserError: 201, a file is missing, or half of a pair; 202 to 204, files contradict each other; 222, the
            vocabulary is needed; 223, the ids are not of it; 225, a wrong loss.
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
    index = Path(f"{path}.index")
    if not index.exists():
        raise UserError(201, f"no such file{looked_up(index)}", "copy X.ds.index next to X.ds", where=index)
    file, ends = DataFile(path, "tokens", 204), DataFile(index, "offsets", 203)
    if ends.size % 8:
        what = f"expected 8 bytes for each document, got {ends.size:,} bytes"
        raise UserError(202, what, "copy it again", where=index)
    offsets = np.concatenate([[0], ends.array("<i8", 0, 0, ends.size // 8)]).astype(np.int64)
    if (np.diff(offsets) < 0).any():
        raise UserError(203, "expected rising ends of documents, got falling ones", "copy it again", where=index)
    count = int(offsets[-1])
    if file.size not in (2 * count, 4 * count):
        what = f"expected 2 or 4 bytes for each of {count:,} tokens of its .index, got {file.size:,} bytes"
        raise UserError(204, what, "copy its files again, or tokenize again", where=path)
    dtype = np.dtype("<u4" if count and file.size == 4 * count else "<u2")
    loss = Path(f"{path}.loss")
    mask = LossBytes(DataFile(loss, "bits", 225, unreadable=225), count) if loss.exists() else None
    return TokenDataset(path, file, dtype, HeldOffsets(offsets), mask=mask)


class LossBytes:
    """Which tokens are trained on, one byte for each.

    Attributes:
        digest: 16 hex digits of all bytes.

    Raises:
        UserError: 225, another number of bytes than tokens, or one that is neither 0 nor 1.
    """

    def __init__(self, file: DataFile, num_tokens: int):
        self._file, digest = file, xxhash.xxh3_64()
        wrong = file.size != num_tokens
        for at in range(0, 0 if wrong else num_tokens, _BLOCK):
            block = file.read(at, min(_BLOCK, num_tokens - at))
            wrong = wrong or bool(block.max() > 1)
            digest.update(block.data)
        if wrong:
            what = f"expected a byte of 0 or 1 for each of {num_tokens:,} tokens, got {file.size:,} bytes or others"
            raise UserError(225, what, "copy it again, or tokenize again", where=file.path)
        self.digest = digest.hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return which of tokens [start, stop) count: bool. Raises UserError 225: the disk does not give them."""
        return self._file.read(start, stop - start).astype(bool)


def _open_headerless(path: Path, vocabulary: Vocabulary) -> TokenDataset:
    file = DataFile(path, "tokens", 204)
    dtype, at, count = (_npy_layout if path.suffix == ".npy" else _bin_layout)(file, vocabulary.size)
    size = file.size - at
    if size % dtype.itemsize or count not in (None, size // dtype.itemsize):
        expected = "a multiple of" if count is None else f"{count:,} x"
        what = f"expected {expected} {dtype.itemsize} bytes of {dtype} tokens after byte {at:,}, got {size:,}"
        raise UserError(204, what, "copy it again, or give the tokenizer that it was made with", where=path)
    num_tokens, ends = size // dtype.itemsize, [np.zeros(1, np.int64)]
    for first in range(0, num_tokens, _BLOCK):
        block = file.array(dtype, at, first, min(first + _BLOCK, num_tokens))
        if first == 0 and len(block) >= 16 and dtype.itemsize < 8 and block.any() and not block[1::2].any():
            bits = 8 * dtype.itemsize
            what = f"expected ids of {bits} bits by the tokenizer, got 0 for every second one: they have {2 * bits}"
            raise UserError(223, what, "give the tokenizer that it was made with (--tokenizer)", where=path)
        ends.append(np.flatnonzero(block == vocabulary.eod) + (first + 1))
    offsets = np.concatenate(ends).astype(np.int64)
    if offsets[-1] != num_tokens:
        offsets = np.append(offsets, num_tokens)
    return TokenDataset(path, file, dtype, HeldOffsets(offsets), at=at)


def _npy_layout(file: DataFile, vocab: int) -> tuple[np.dtype, int, int | None]:
    """Return the type of the ids, the byte of the first, and their number as the header says it; None: it does not."""
    head = file.read(0, min(_MOST_HEADER, file.size)).tobytes()
    if not head.startswith(_NPY):
        kind = next(kind for kind in ("<u1", "<u2", "<u4", "<u8") if vocab - 1 <= np.iinfo(kind).max)
        return np.dtype(kind), 0, None
    stream, expected = io.BytesIO(head), "one row of integers, little endian"
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        what = f"expected numpy's header of {expected}: {error}"
        raise UserError(202, what, "write it again with numpy.save", where=file.path) from error
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.newbyteorder("<") != dtype:
        what = f"expected {expected}, got {dtype} of shape {shape}"
        raise UserError(202, what, "write it again with numpy.save of one array of ids", where=file.path)
    return dtype, stream.tell(), shape[0]


def _bin_layout(file: DataFile, vocab: int) -> tuple[np.dtype, int, int | None]:
    """Return what `_npy_layout` returns, of a .bin without an index."""
    head = file.read(0, min(_LLM_C.size, file.size)).tobytes()
    if len(head) == _LLM_C.size and file.size >= _LLM_C_BYTES:
        magic, version, count = _LLM_C.unpack(head)
        if (magic, version) in _LLM_C_KINDS:
            return np.dtype(_LLM_C_KINDS[magic, version]), _LLM_C_BYTES, count
    if vocab > 1 << 16:
        what = f"expected ids of 16 bits in a .bin without an index, got a tokenizer of {vocab:,} ids"
        do = "rename it .npy if it is raw ids of 32 bits, or give the prefix of a .bin and .idx"
        raise UserError(223, what, do, where=file.path)
    return np.dtype("<u2"), 0, None
