"""Read and check the index of Megatron's data sets, PREFIX.idx, in bounded memory.

The format is that of indexed_dataset.py. Behind the document indices there may be the modes of the sequences, as
Megatron writes them for multimodal data; nothing in the header says so, the file's size does:

    int8      mode of each sequence: 0 for text                                              [S]

An index says the same several times (lengths, pointers and file size), and each time is checked: a truncated copy, a
mixed-up pair or a flipped bit is refused with the numbers, not met as garbage in step 40,000. Of a large index the
whole check is remembered (remembered.py).
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.data.data_file import DataFile
from megazero.data.document_offsets import DocumentOffsets

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_BLOCK = 1 << 19  # sequences that are checked at a time
_DO = "copy it again or rebuild it with `megazero preprocess`"


class Index(NamedTuple):
    """An index whose header fits its size.

    Attributes:
        file: it.
        dtype: of the ids.
        sequences, documents: counts.
        modes: the sequences have modes.
        num_tokens: of all sequences.
    """

    file: DataFile
    dtype: np.dtype
    sequences: int
    documents: int
    modes: bool
    num_tokens: int

    @property
    def _pointers_at(self) -> int:
        return HEADER.size + 4 * self.sequences

    @property
    def _indices_at(self) -> int:
        return self._pointers_at + 8 * self.sequences

    def lengths(self, first: int, stop: int) -> np.ndarray:
        """Return the tokens of sequences [first, stop), int32."""
        return self.file.array("<i4", HEADER.size, first, stop)

    def pointers(self, first: int, stop: int) -> np.ndarray:
        """Return the bytes at which sequences [first, stop) begin, int64."""
        return self.file.array("<i8", self._pointers_at, first, stop)

    def indices(self, first: int, stop: int) -> np.ndarray:
        """Return the first sequences of documents [first, stop), int64; of the one behind the last: all sequences."""
        return self.file.array("<i8", self._indices_at, first, stop)

    def modes_of(self, first: int, stop: int) -> np.ndarray:
        """Return the modes of sequences [first, stop), int8."""
        return self.file.array("i1", self._indices_at + 8 * (self.documents + 1), first, stop)

    def refused(self, what: str) -> UserError:
        """Return the error for an index that contradicts itself."""
        return UserError(203, what, _DO, where=self.file.path)


def open_index(file: DataFile) -> Index:
    """Return the index of a file, of which only the header and the last sequence are read.

    Raises:
        UserError: 202, it is no index, or of another size than its header says; 203, it has no document.
    """
    path, rebuild = file.path, "rebuild it with `megazero preprocess`"
    header = file.read(0, min(HEADER.size, file.size)).tobytes()
    if len(header) < HEADER.size:
        raise UserError(202, f"expected a header of {HEADER.size} bytes, got {len(header)}", rebuild, where=path)
    magic, version, code, sequences, documents = HEADER.unpack(header)
    if magic != MAGIC:
        raise UserError(202, f"expected magic {MAGIC!r}, got {magic!r}: not an index", rebuild, where=path)
    if version != VERSION:
        raise UserError(202, f"expected version {VERSION}, got {version}", rebuild, where=path)
    dtype = np.dtype(DTYPE_CODES.get(code, np.float64)).newbyteorder("<")
    if dtype.kind == "f":
        raise UserError(202, f"expected the dtype code of an integer type, got {code}", rebuild, where=path)
    expected = HEADER.size + 12 * sequences + 8 * documents
    if file.size not in (expected, expected + sequences):
        what = f"expected {expected:,} bytes ({sequences:,} sequences, {documents:,} document indices), "
        what += f"or {sequences:,} more with modes, got {file.size:,}"
        raise UserError(202, what, "copy it again or rebuild it", where=path)
    index = Index(file, dtype, sequences, documents - 1, file.size != expected, 0)
    if not documents:
        raise index.refused(f"expected document indices from 0 to {sequences:,}, got none")
    if not sequences:
        return index
    length, pointer = int(index.lengths(sequences - 1, sequences)[0]), int(index.pointers(sequences - 1, sequences)[0])
    return index._replace(num_tokens=pointer // dtype.itemsize + length)


def check_index(index: Index) -> None:
    """Refuse an index that contradicts itself. Raises UserError 203."""
    with doing(f"checking {index.file.path}", index.sequences + index.documents) as progress:
        offset, itemsize = 0, index.dtype.itemsize
        for first in range(0, index.sequences, _BLOCK):
            stop = min(first + _BLOCK, index.sequences)
            offset = _check_sequences(index, first, stop, offset, itemsize)
            progress.advance(stop - first)
        before, last = int(index.indices(0, 1)[0]), int(index.indices(index.documents, index.documents + 1)[0])
        if before or last != index.sequences:
            got = f"{before:,} to {last:,}"
            raise index.refused(f"expected document indices from 0 to {index.sequences:,}, got {got}")
        for first in range(0, index.documents + 1, _BLOCK):
            found = index.indices(first, min(first + _BLOCK, index.documents + 1))
            _check_documents(index, first, before, found)
            before = int(found[-1])
            progress.advance(len(found))


def _check_sequences(index: Index, first: int, stop: int, offset: int, itemsize: int) -> int:
    """Check sequences [first, stop), of which the first begins at this token; return where the last one ends."""
    lengths = index.lengths(first, stop)
    if lengths.min() < 0:
        at = int(np.argmax(lengths < 0))
        raise index.refused(f"expected lengths >= 0, got {lengths[at]} for sequence {first + at:,}")
    ends = offset + np.cumsum(lengths, dtype=np.int64)
    pointers = index.pointers(first, stop)
    wrong = pointers != (ends - lengths) * itemsize
    if wrong.any():
        at = int(np.argmax(wrong))
        expected = (ends[at] - lengths[at]) * itemsize
        raise index.refused(f"expected sequence {first + at:,} at byte {expected:,}, got {pointers[at]:,}")
    if index.modes and (other := index.modes_of(first, stop)).any():
        at = int(np.argmax(other != 0))
        what = f"expected mode 0, text, got {other[at]} for sequence {first + at:,}, of which tokens are no ids of text"
        raise UserError(203, what, "train on text alone", where=index.file.path)
    return int(ends[-1])


def _check_documents(index: Index, first: int, before: int, found: np.ndarray) -> None:
    """Check document indices from `first` on, behind one that is `before`."""
    steps = np.diff(found, prepend=before)
    if (steps < 0).any():
        at = int(np.argmax(steps < 0))
        what = f"expected rising document indices, got {before if at == 0 else found[at - 1]:,} then {found[at]:,}"
        raise index.refused(f"{what} at {first + at - 1:,}")
    # As many documents as sequences means one each; anything else is an index with a flipped bit (an emptied document
    # beside a doubled one), not something a tool wrote.
    begins = steps[1:] if first == 0 else steps
    if index.documents == index.sequences and (begins != 1).any():
        at = int(np.argmax(begins != 1))
        document = at if first == 0 else first + at - 1
        raise index.refused(f"expected one sequence per document, got {begins[at]} in document {document:,}")


class IndexOffsets(DocumentOffsets):
    """The document offsets of an index, which are the pointers of documents' first sequences."""

    def __init__(self, index: Index):
        super().__init__(index.documents, index.num_tokens)
        self._index = index

    def _read(self, first: int, stop: int) -> np.ndarray:
        index = self._index
        if stop <= first:
            return np.empty(0, np.int64)
        if index.documents == index.sequences:  # one sequence each, as `check_index` has found
            return self._starts(first, stop)
        which = index.indices(first, stop)
        low, high = int(which[0]), int(which[-1])
        if low < 0 or high > index.sequences or (np.diff(which) < 0).any():
            raise index.refused(f"expected rising document indices up to {index.sequences:,}, got {low:,} to {high:,}")
        found = np.empty(len(which), np.int64)
        at = 0
        while at < len(which):  # in pieces: a document may have any number of sequences
            begin = int(which[at])
            end = int(np.searchsorted(which, begin + _BLOCK))
            found[at:end] = self._starts(begin, int(which[end - 1]) + 1)[which[at:end] - begin]
            at = end
        return found

    def _starts(self, first: int, stop: int) -> np.ndarray:
        """Return the tokens at which sequences [first, stop) begin; behind the last one that is the end."""
        index = self._index
        found = index.pointers(first, min(stop, index.sequences)) // index.dtype.itemsize
        return found if stop <= index.sequences else np.append(found, index.num_tokens)

    def _refuse(self, what: str) -> UserError:
        return self._index.refused(what)


def index_path(prefix: str | Path) -> Path:
    """Return the path of an index, of a prefix that may contain dots ("web-v1.5"): the suffix is appended."""
    return Path(f"{Path(prefix)}.idx")
