"""Token files: Megatron's indexed data set, a `.bin` of token ids and an `.idx` that says where documents end.

Ids of all documents lie end to end in one file of which only what is needed is read, so opening a terabyte costs
nothing and ranks on one machine share the page cache. (It is not mapped: if a mapped file is truncated, SIGBUS ends the
process, where a read returns an error.) The index is small and redundant (lengths, pointers and file size all say the
same), and this reader checks every redundancy once, when it opens: a truncated copy, a mixed-up pair or a flipped bit
in the index is refused with the numbers, not met as garbage in step 40,000.

    PREFIX.bin   token ids, little endian, no header
    PREFIX.idx   9 bytes   "MMIDIDX", then two zero bytes
                 u64       version = 1
                 u8        dtype code (see DTYPE_CODES)
                 u64       S, number of sequences
                 u64       D + 1, number of document indices
                 int32     length of each sequence, in tokens        [S]
                 int64     byte position of each sequence in .bin    [S]
                 int64     first sequence of each document, then S   [D + 1]

Source of the format: Megatron-LM, megatron/core/datasets/indexed_dataset.py. Files of either side work on the other.
Our writer makes one sequence per document (more only past 2^31 - 1 tokens).
"""

import os
import struct
import weakref
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

import numpy as np

from megazero.base.atomic import write_error
from megazero.base.errors import UserError
from megazero.base.files import flush, flush_folder, temporary_name
from megazero.base.reading import looked_up, open_regular
from megazero.data.loss_mask import mask_path, open_mask

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
MAX_SEQUENCE = 2**31 - 1  # tokens: lengths are int32


def file_pair(prefix: str | Path) -> tuple[Path, Path]:
    """Return the .bin and .idx paths of a prefix, which may contain dots ("web-v1.5"): the suffix is appended."""
    path = Path(prefix)  # "data/" is "data"
    return Path(f"{path}.bin"), Path(f"{path}.idx")


class IndexedDataset:
    """A validated, read-only data set.

    Attributes:
        prefix, bin_path, idx_path: its paths.
        dtype: the integer type of the ids.
        num_documents, num_tokens: counts.
        document_offsets: int64 [num_documents + 1], in tokens; document d is tokens[offsets[d] : offsets[d + 1]].
        mask: which tokens are trained on; None: all are.

    Raises:
        UserError: 201 missing file, 202 damaged index header, 203 contradictory index, 204 .bin of another size,
            225 a mask that is damaged or of other tokens.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = file_pair(prefix)
        refuse_missing(prefix)
        try:
            with open_regular(self.idx_path) as descriptor, open(descriptor, "rb", closefd=False) as file:
                self.dtype, lengths, pointers, indices = _read_index(file, self.idx_path)
            with open_regular(self.bin_path) as descriptor:  # kept open: what replaces the file later is another file
                self._bin = os.dup(descriptor)
            weakref.finalize(self, os.close, self._bin)
            bin_bytes = os.fstat(self._bin).st_size
        except OSError as error:
            what, where = f"cannot be read: {error.strerror}", error.filename or self.idx_path
            raise UserError(201, what, "give token files that can be read", where=where) from error
        offsets = _check_index(self.idx_path, self.dtype.itemsize, lengths, pointers, indices)
        self.document_offsets: np.ndarray = offsets[indices]
        self.document_offsets.flags.writeable = False
        self.num_documents = len(indices) - 1
        self.num_tokens = int(offsets[-1])
        expected = self.num_tokens * self.dtype.itemsize
        if bin_bytes != expected:
            what = f"expected {expected:,} bytes ({self.num_tokens:,} {self.dtype} tokens), got {bin_bytes:,}"
            raise UserError(204, what, "copy both files again or rebuild them", where=self.bin_path)
        self.mask = open_mask(prefix, self.num_tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the file, in the file's type.

        Raises:
            UserError: 204, the file has become shorter since it was opened; 201, the disk does not give them.
        """
        assert 0 <= start <= stop <= self.num_tokens
        tokens = np.empty(stop - start, self.dtype)
        rest, at = tokens.view(np.uint8).data, start * self.dtype.itemsize
        while rest:
            try:
                got = os.preadv(self._bin, [rest], at)
            except OSError as error:
                raise UserError(
                    201, f"cannot be read: {error.strerror}", "mend the disk", where=self.bin_path
                ) from error
            if not got:
                size = os.fstat(self._bin).st_size
                what = f"was truncated since it was opened: it ends at byte {size:,}, tokens lie at byte {at:,}"
                raise UserError(204, what, "copy it again, and resume", where=self.bin_path)
            rest, at = rest[got:], at + got
        return tokens

    def locate(self, token: int) -> tuple[int, int]:
        """Return (document, position in it) of the token at this index of the file."""
        document = int(np.searchsorted(self.document_offsets, token, side="right")) - 1
        return document, token - int(self.document_offsets[document])


def refuse_missing(prefix: str | Path) -> None:
    """Refuse a data set of which a file is missing. Raises UserError 201."""
    bin_path, idx_path = file_pair(prefix)
    for path in (idx_path, bin_path):
        if not path.exists():
            raise UserError(201, f"no such token file{looked_up(path)}", _how_to_make(Path(prefix)), where=path)


def _how_to_make(prefix: Path) -> str:
    if prefix.suffix in (".bin", ".idx"):
        return f"give the prefix without {prefix.suffix}"
    if "data/quickstart" in prefix.as_posix():
        return "run `make data`"
    return f"run `python data_tools/preprocess.py --input TEXT --tokenizer MODEL --output {prefix}`"


def _read_index(file: BinaryIO, path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return header and arrays; counts are checked against the file's size before arrays of that size are allocated."""
    header = file.read(HEADER.size)
    rebuild = "rebuild it with data_tools/preprocess.py"
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
    actual = os.fstat(file.fileno()).st_size
    if actual != expected:
        what = f"expected {expected:,} bytes ({sequences:,} sequences, {documents:,} document indices), got {actual:,}"
        raise UserError(202, what, "copy it again or rebuild it", where=path)
    lengths = np.frombuffer(file.read(4 * sequences), "<i4")
    pointers = np.frombuffer(file.read(8 * sequences), "<i8")
    indices = np.frombuffer(file.read(8 * documents), "<i8")
    return dtype, lengths, pointers, indices


def _check_index(
    path: Path, itemsize: int, lengths: np.ndarray, pointers: np.ndarray, indices: np.ndarray
) -> np.ndarray:
    """Return the token offset of every sequence, int64 [S + 1], once the index is found to agree with itself."""

    def refuse(what: str) -> NoReturn:
        raise UserError(203, what, "copy it again or rebuild it with data_tools/preprocess.py", where=path)

    sequences = len(lengths)
    if sequences and lengths.min() < 0:
        first = int(np.argmax(lengths < 0))
        refuse(f"expected lengths >= 0, got {lengths[first]} for sequence {first:,}")
    offsets = np.zeros(sequences + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    wrong = pointers != offsets[:-1] * itemsize
    if wrong.any():
        first = int(np.argmax(wrong))
        refuse(f"expected sequence {first:,} at byte {offsets[first] * itemsize:,}, got {pointers[first]:,}")
    if not len(indices) or indices[0] != 0 or indices[-1] != sequences:
        got = f"{indices[0]:,} to {indices[-1]:,}" if len(indices) else "none"
        refuse(f"expected document indices from 0 to {sequences:,}, got {got}")
    falls = np.diff(indices) < 0
    if falls.any():
        first = int(np.argmax(falls))
        refuse(f"expected rising document indices, got {indices[first]:,} then {indices[first + 1]:,} at {first:,}")
    # As many documents as sequences means one each; anything else is an index with a flipped bit (an emptied document
    # beside a doubled one), not something a tool wrote.
    if len(indices) == sequences + 1 and (np.diff(indices) != 1).any():
        first = int(np.argmax(np.diff(indices) != 1))
        refuse(f"expected one sequence per document, got {indices[first + 1] - indices[first]} in document {first:,}")
    return offsets


class IndexedDatasetWriter:
    """A writer of a pair of files, of which a reader sees the whole or nothing.

    Both files are written under unique temporary names in the target folder, flushed to the disk, and renamed, .idx
    last: a reader accepts nothing without .idx. An old pair keeps working until then; its .idx is removed before its
    .bin is replaced, so that old index and new tokens never meet. Leaving the `with` block by an exception removes the
    temporary files; a killed process leaves them behind, named `NAME.bin.tmp-...`, and no reader looks at those.

        with IndexedDatasetWriter("data/train", np.uint16) as writer:
            writer.append(ids)          # any number of times per document
            writer.end_document()

    Args:
        prefix, dtype: of the files.
        kept: where the tokens are written in place of a temporary file; an exception does not remove it.
        lengths: of the documents that are in it already; what is behind them is cut off.
        mask: a whole file that becomes the data set's mask; None: it has none, and an old one is removed.

    Raises:
        UserError: 208 when the system refuses to write (disk full, no permission).
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: type[np.integer] | np.dtype,
        *,
        kept: Path | None = None,
        lengths: Iterable[int] = (),
        mask: Path | None = None,
    ):
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, kind in DTYPE_CODES.items() if np.dtype(kind) == np.dtype(dtype))
        self._targets = file_pair(prefix)
        self._mask, self._mask_target = mask, mask_path(prefix)
        self._temporary = tuple(temporary_name(path) for path in self._targets)
        self._kept = kept is not None
        if kept is not None:
            self._temporary = (kept, self._temporary[1])
        self._lengths = array("i")  # per sequence; 4 bytes a document is all that the writer holds in memory
        self._documents = array("q", [0])
        self._open_length = 0  # tokens of the sequence that is being written
        self.num_tokens = 0
        for length in lengths:
            self._grow(length)
            self.end_document()

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def __enter__(self) -> "IndexedDatasetWriter":
        with self._write_errors():
            self._targets[0].parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary[0].open("ab" if self._kept else "xb")
            self._file.truncate(self.num_tokens * self.dtype.itemsize)
        return self

    def flush(self) -> None:
        """Flush the tokens to the disk. Raises UserError 208."""
        with self._write_errors():
            flush(self._file)

    def append(self, tokens: np.ndarray) -> None:
        """Add ids [n], of any integer type, to the document that is being written."""
        ids = tokens.astype(self.dtype, copy=False)
        assert np.array_equal(ids, tokens), f"ids do not fit {self.dtype}"
        with self._write_errors():
            self._file.write(ids.tobytes())
        self._grow(len(ids))

    def _grow(self, count: int) -> None:
        self.num_tokens += count
        self._open_length += count
        while self._open_length > MAX_SEQUENCE:
            self._lengths.append(MAX_SEQUENCE)
            self._open_length -= MAX_SEQUENCE

    def end_document(self) -> None:
        """Close the document; it must hold a token."""
        assert self._open_length, "a document needs at least one token"
        self._lengths.append(self._open_length)
        self._open_length = 0
        self._documents.append(len(self._lengths))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._open_length, "the last document was not ended"
                with self._write_errors():
                    self._publish()
        finally:
            with suppress(OSError):  # a full disk fails again when what is buffered is flushed by close
                self._file.close()
            for path in self._temporary[self._kept :]:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _publish(self) -> None:
        flush(self._file)
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        pointers = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=pointers[1:])
        pointers *= self.dtype.itemsize
        header = HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._documents))
        with self._temporary[1].open("xb") as file:
            file.write(header)
            file.write(lengths.astype("<i4").tobytes())
            file.write(pointers.astype("<i8").tobytes())
            file.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
            flush(file)
        self._targets[1].unlink(missing_ok=True)
        if self._mask is None:
            self._mask_target.unlink(missing_ok=True)
        else:
            self._mask.replace(self._mask_target)
        for temporary, target in zip(self._temporary, self._targets, strict=True):
            temporary.replace(target)
        flush_folder(self._targets[0].parent)

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._targets[0], error) from error
