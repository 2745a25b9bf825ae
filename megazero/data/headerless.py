"""Read token files that do not say where documents end: ids one behind the other, and the id that ends a document.

    X.npy   OLMo-core's and Dolma's: raw ids, little endian, no header in spite of the name. The type is the smallest
            unsigned one that holds the tokenizer's ids (8, 16, 32 or 64 bits). One that numpy has written, which begins
            with 0x93 "NUMPY", is read as well: its header says the type, and it must be one row of integers.
    X.bin   without an index: nanoGPT's (raw ids of 16 bits) or llm.c's, which begins with 256 int32: 20240520, 1 (ids
            of 16 bits) or 20240801, 7 (of 32 bits), then the number of ids.

Sources: allenai/OLMo-core, src/olmo_core/data/utils.py; karpathy/nanoGPT, data/openwebtext/prepare.py; karpathy/llm.c,
dev/data/data_common.py. A document is what ends with the end-of-document id, which belongs to it; ids behind the last
one are a document too. (In llm.c's files the id stands before each document; windows of text are the same.) Ends of
documents are found by reading the file once; of a large file they are remembered.
"""

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.data.data_file import DataFile, Descriptors
from megazero.data.document_offsets import DocumentOffsets, EndOffsets, HeldOffsets
from megazero.data.remembered import Memory, identity_of
from megazero.data.token_dataset import TokenDataset, TokenIds

_NPY = b"\x93NUMPY"
_LLM_C = struct.Struct("<3i")
_LLM_C_BYTES = 1024
_LLM_C_KINDS = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}
_LARGE = 1 << 26  # tokens from which on ends of documents are remembered
_BLOCK = 1 << 22  # tokens that are read at a time
_MOST_HEADER = 1 << 16  # bytes of numpy's


class Layout(NamedTuple):
    """The place of the ids in a file, and their type.

    Attributes:
        dtype: of the ids.
        at: the byte of the first.
        count: of them; None: as many as the file has room for.
    """

    dtype: np.dtype
    at: int
    count: int | None


def open_headerless(path: Path, ids: TokenIds, descriptors: Descriptors | None = None) -> TokenDataset:
    """Open a .npy, or a .bin without an index.

    Args:
        ids: what the tokenizer says.

    Raises:
        UserError: 201, it is missing; 202, a header that says something else; 204, another size than it says; 223, its
            ids are not as the tokenizer's.
    """
    file = DataFile(path, "tokens", 204, descriptors)
    layout = _npy_layout(file, ids) if path.suffix == ".npy" else _bin_layout(file, ids)
    size, (dtype, at, count) = file.size - layout.at, layout
    if size % dtype.itemsize or count not in (None, size // dtype.itemsize):
        expected = "a multiple of" if count is None else f"{count:,} x"
        what = f"expected {expected} {dtype.itemsize} bytes of {dtype} tokens behind byte {at:,}, got {size:,}"
        raise UserError(204, what, "copy it again, or give the tokenizer that it was made with", where=path)
    num_tokens = size // dtype.itemsize
    _refuse_wider(file, layout, num_tokens)

    def find() -> Iterator[bytes]:
        return _ends(file, layout, num_tokens, ids.eod)

    memory = Memory(path, identity_of(file)) if num_tokens >= _LARGE else None
    kept = None if memory is None else memory.file_once(f"ends-{ids.eod}-{dtype.name}", find)
    if kept is None:
        ends = np.frombuffer(b"".join(find()), np.int64)
        offsets: DocumentOffsets = HeldOffsets(np.concatenate([[0], ends]).astype(np.int64))
    else:
        offsets = EndOffsets(kept, 0, kept.size // 8)
    return TokenDataset(path, file, dtype, offsets, at=at, memory=memory)


def _npy_layout(file: DataFile, ids: TokenIds) -> Layout:
    head = file.read(0, min(_MOST_HEADER, file.size)).tobytes()
    if not head.startswith(_NPY):
        kinds = (np.uint8, np.uint16, np.uint32, np.uint64)
        kind = next(kind for kind in kinds if ids.vocab_size - 1 <= np.iinfo(kind).max)
        return Layout(np.dtype(kind).newbyteorder("<"), 0, None)
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
    return Layout(dtype, stream.tell(), shape[0])


def _bin_layout(file: DataFile, ids: TokenIds) -> Layout:
    if file.size >= _LLM_C_BYTES:
        magic, version, count = _LLM_C.unpack(file.read(0, _LLM_C.size).tobytes())
        if (kind := _LLM_C_KINDS.get((magic, version))) is not None:
            return Layout(np.dtype(kind).newbyteorder("<"), _LLM_C_BYTES, count)
    if ids.vocab_size > 1 << 16:
        what = f"expected ids of 16 bits in a .bin without an index, got a tokenizer of {ids.vocab_size:,} ids"
        do = "rename it .npy if it is raw ids of 32 bits, or give the prefix of a .bin and .idx"
        raise UserError(223, what, do, where=file.path)
    return Layout(np.dtype("<u2"), 0, None)


def _refuse_wider(file: DataFile, layout: Layout, num_tokens: int) -> None:
    """Refuse ids of which every second one is 0: they are of twice as many bits. Raises UserError 223."""
    some = file.array(layout.dtype, layout.at, 0, min(num_tokens, _BLOCK))
    if len(some) >= 16 and layout.dtype.itemsize < 8 and some.any() and not some[1::2].any():
        bits = 8 * layout.dtype.itemsize
        what = f"expected ids of {bits} bits by the tokenizer, got 0 for every second one: they have {2 * bits}"
        raise UserError(223, what, "give data.tokenizer that it was made with", where=file.path)


def _ends(file: DataFile, layout: Layout, num_tokens: int, eod: int) -> Iterator[bytes]:
    """Yield the tokens behind which a document ends, int64, in pieces; what is behind the last end is one too."""
    last = eod
    with doing(f"looking for the ends of documents in {file.path}", num_tokens) as progress:
        for first in range(0, num_tokens, _BLOCK):
            block = file.array(layout.dtype, layout.at, first, min(first + _BLOCK, num_tokens))
            yield (np.flatnonzero(block == eod) + (first + 1)).tobytes()
            progress.advance(len(block))
            last = int(block[-1])
    if last != eod:
        yield np.array([num_tokens]).tobytes()
