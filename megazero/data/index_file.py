"""Read and check the index of Megatron's data sets, PREFIX.idx.

The format is in indexed_dataset.py. The document indices may be followed by the modes of the sequences, as Megatron
writes them for multimodal data; the header does not mention them, but the file's size includes them:

    int8      mode of each sequence: 0 for text                                              [S]

The file is memory-mapped, not loaded. An index is redundant (lengths, pointers and file size), and all of it is checked
for contradictions in bounded memory: a truncated copy, a mixed-up pair or a flipped bit is refused with the numbers,
instead of giving garbage in step 40,000.
"""

import struct
from pathlib import Path

import numpy as np

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.data.data_file import DataFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floats
_BLOCK = 1 << 19  # sequences that are checked at a time
_DO = "copy it again or rebuild it with `megazero preprocess`"


class Index:
    """A checked index; its arrays are memory-mapped.

    Attributes:
        dtype: the type of the ids.
        lengths, pointers: tokens of each sequence, and the byte at which it begins: int32 and int64 [S].
        documents: the first sequence of each document, then S: int64 [D + 1].
        modes: the modes of the sequences, int8 [S], or [0] if they have none.

    Raises:
        UserError: 201, it cannot be read; 202, it is not an index, or its size differs from its header's; 203, it
            contradicts itself.
    """

    def __init__(self, path: Path):
        self._path = path
        content = DataFile(path, "entries", 203).mapped()
        if len(content) < HEADER.size:
            raise UserError(202, f"expected a header of {HEADER.size} bytes, got {len(content)}", _DO, where=path)
        magic, version, code, sequences, documents = HEADER.unpack(content[: HEADER.size])
        if (magic, version) != (MAGIC, VERSION) or code not in DTYPE_CODES:
            what = f"expected magic {MAGIC!r}, version {VERSION} and the code of an integer type, got {magic!r}, "
            raise UserError(202, f"{what}{version} and {code}", _DO, where=path)
        expected = HEADER.size + 12 * sequences + 8 * documents
        if len(content) not in (expected, expected + sequences):
            what = f"expected {expected:,} bytes ({sequences:,} sequences, {documents:,} document indices), "
            what += f"or {sequences:,} more with modes, got {len(content):,}"
            raise UserError(202, what, _DO, where=path)
        self.dtype = np.dtype(DTYPE_CODES[code]).newbyteorder("<")
        self.lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
        self.pointers = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
        self.documents = np.frombuffer(content, "<i8", documents, HEADER.size + 12 * sequences)
        self.modes = np.frombuffer(content, "i1", len(content) - expected, expected)
        self._check()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1]) if len(self.lengths) else 0

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """Return where documents [first, stop) start, in tokens: int64, from the pointers of their first sequences."""
        which = self.documents[first:stop]
        found = np.full(len(which), self.num_tokens, np.int64)  # after the last sequence
        inside = which < len(self.pointers)
        found[inside] = self.pointers[which[inside]] // self.dtype.itemsize
        return found

    def _refused(self, what: str) -> UserError:
        """Return the error for an index that contradicts itself."""
        return UserError(203, what, _DO, where=self._path)

    def _check(self) -> None:
        sequences, documents = len(self.lengths), len(self.documents) - 1
        if documents < 0:
            raise self._refused(f"expected document indices from 0 to {sequences:,}, got none")
        with doing(f"checking {self._path}", sequences + documents) as progress:
            end = 0
            for first in range(0, sequences, _BLOCK):
                end = self._check_sequences(first, end)
                progress.advance(_BLOCK)
            before, last = int(self.documents[0]), int(self.documents[-1])
            if (before, last) != (0, sequences):
                raise self._refused(f"expected document indices from 0 to {sequences:,}, got {before:,} to {last:,}")
            for first in range(0, documents, _BLOCK):
                found = self.documents[first : first + _BLOCK + 1]
                steps = np.diff(found)
                # As many documents as sequences means one sequence each. An empty document next to a double one is not
                # written by any tool, but is the result of a flipped bit.
                one_each = documents == sequences
                wrong = steps != 1 if one_each else steps < 0
                if wrong.any():
                    at = int(np.argmax(wrong))
                    expected = "one sequence" if one_each else "0 or more sequences"
                    what = f"expected {expected} in document {first + at:,}, got {steps[at]:,} from {found[at]:,} on"
                    raise self._refused(what)
                progress.advance(_BLOCK)

    def _check_sequences(self, first: int, begin: int) -> int:
        """Check a block of sequences from `first` on, which begins at token `begin`; return the token where it ends."""
        lengths = self.lengths[first : first + _BLOCK]
        pointers = self.pointers[first : first + _BLOCK]
        ends = begin + np.cumsum(lengths, dtype=np.int64)
        expected = (ends - lengths) * self.dtype.itemsize
        wrong = (lengths < 0) | (pointers != expected)
        if wrong.any():
            at = int(np.argmax(wrong))
            what = f"expected sequence {first + at:,} at byte {expected[at]:,} with 0 or more tokens, "
            raise self._refused(f"{what}got byte {pointers[at]:,} and {lengths[at]} tokens")
        if (other := self.modes[first : first + _BLOCK]).any():
            at = int(np.argmax(other != 0))
            what = f"expected mode 0 (text), got {other[at]} for sequence {first + at:,}, "
            what += "whose tokens are not ids of text"
            raise UserError(203, what, "use a data set with text only", where=self._path)
        return int(ends[-1])
