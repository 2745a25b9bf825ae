"""Token files: Megatron's indexed data set, a `.bin` of token ids and an `.idx` that says where documents end.

Ids of all documents lie end to end in one file of which only what is needed is read, so opening a terabyte costs
nothing and ranks on one machine share the page cache. The index is read in the same way, and checked as a whole
(index_file.py).

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

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from megazero.base.atomic import write_error
from megazero.base.errors import UserError
from megazero.base.files import flush, flush_folder, temporary_name
from megazero.base.reading import looked_up
from megazero.base.this_copy import here
from megazero.data.data_file import DataFile, Descriptors
from megazero.data.document_offsets import held
from megazero.data.index_file import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexOffsets,
    check_index,
    index_path,
    open_index,
)
from megazero.data.loss_mask import mask_path, open_mask
from megazero.data.token_dataset import TokenDataset

MAX_SEQUENCE = 2**31 - 1  # tokens: lengths are int32


def file_pair(prefix: str | Path) -> tuple[Path, Path]:
    """Return the .bin and .idx paths of a prefix, which may contain dots ("web-v1.5"): the suffix is appended."""
    path = Path(prefix)  # "data/" is "data"
    return Path(f"{path}.bin"), index_path(path)


class IndexedDataset(TokenDataset):
    """A validated, read-only data set of a .bin and an .idx.

    Args:
        descriptors: shared with other files; None: it has its own.

    Attributes:
        prefix, bin_path, idx_path: its paths.

    Raises:
        UserError: 201 missing file, 202 damaged index header, 203 contradictory index, 204 .bin of another size,
            225 a mask that is damaged or of other tokens.
    """

    def __init__(self, prefix: str | Path, descriptors: Descriptors | None = None):
        bin_path, self.idx_path = file_pair(prefix)
        refuse_missing(prefix)
        index = open_index(DataFile(self.idx_path, "offsets", 203, descriptors))
        file = DataFile(bin_path, "tokens", 204, descriptors)
        check_index(index)
        expected = index.num_tokens * index.dtype.itemsize
        if file.size != expected:
            what = f"expected {expected:,} bytes ({index.num_tokens:,} {index.dtype} tokens), got {file.size:,}"
            raise UserError(204, what, "copy both files again or rebuild them", where=bin_path)
        offsets = held(IndexOffsets(index), many_files=descriptors is not None)
        mask = open_mask(prefix, index.num_tokens, descriptors)
        super().__init__(prefix, file, index.dtype, offsets, mask=mask)


def refuse_missing(prefix: str | Path) -> None:
    """Refuse a data set of which a file is missing. Raises UserError 201."""
    bin_path, idx_path = file_pair(prefix)
    for path in (idx_path, bin_path):
        if not path.exists():
            raise UserError(201, f"no such token file{looked_up(path)}", _how_to_make(Path(prefix)), where=path)


def _how_to_make(prefix: Path) -> str:
    if prefix.suffix in (".ds", ".npy", ".bin") and prefix.exists() and not prefix.with_suffix(".idx").exists():
        return f"copy another project's file into our format: `megazero merge {prefix} --output PREFIX`"
    if prefix.suffix in (".bin", ".idx"):
        return f"give the prefix without {prefix.suffix}"
    if "data/quickstart" in prefix.as_posix():
        return here("run `make data`", "make token files of your text with `megazero preprocess`, and name them")
    return f"run `megazero preprocess --input TEXT --tokenizer MODEL --output {prefix}`"


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
