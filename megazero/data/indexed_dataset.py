"""Token files: Megatron's indexed data set, a `.bin` of token ids and an `.idx` that says where documents end.

The ids of all documents are end to end in one file. Only the needed parts are read, so opening a terabyte costs nothing
and ranks on one host share the page cache. The index is memory-mapped, and checked as a whole (index_file.py).

    PREFIX.bin   token ids, little endian, no header
    PREFIX.idx   9 bytes   "MMIDIDX", then two zero bytes
                 u64       version = 1
                 u8        dtype code (see DTYPE_CODES)
                 u64       S, number of sequences
                 u64       D + 1, number of document indices
                 int32     length of each sequence, in tokens        [S]
                 int64     byte position of each sequence in .bin    [S]
                 int64     first sequence of each document, then S   [D + 1]

Source of the format: Megatron-LM, megatron/core/datasets/indexed_dataset.py. Each project reads the other's files.
This writer makes one sequence per document (more only above 2^31 - 1 tokens).
"""

from array import array
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from megazero.base.errors import UserError
from megazero.base.files import flush, flush_folder, temporary_name, writing
from megazero.base.reading import looked_up
from megazero.data.data_file import DataFile
from megazero.data.index_file import DTYPE_CODES, HEADER, MAGIC, VERSION, Index
from megazero.data.loss_mask import LossMask, LossMaskWriter, mask_path
from megazero.data.token_dataset import TokenDataset

MAX_SEQUENCE = 2**31 - 1  # tokens: lengths are int32


def file_pair(prefix: str | Path) -> tuple[Path, Path]:
    """Return the .bin and .idx paths of a prefix, which may contain dots ("web-v1.5"): the suffix is appended."""
    path = Path(prefix)  # "data/" is "data"
    return Path(f"{path}.bin"), Path(f"{path}.idx")


class IndexedDataset(TokenDataset):
    """A validated, read-only data set of a .bin and an .idx.

    Attributes:
        prefix, bin_path, idx_path: its paths.

    Raises:
        UserError: 201 missing file, 202 damaged index header, 203 contradictory index, 204 .bin of another size,
            225 a mask that is damaged or of other tokens.
    """

    def __init__(self, prefix: str | Path):
        self.bin_path, self.idx_path = file_pair(prefix)
        refuse_missing(prefix)
        self.prefix, self._index = Path(prefix), Index(self.idx_path)
        self._file = DataFile(self.bin_path, "tokens", 204)
        self.dtype, self.num_tokens = self._index.dtype, self._index.num_tokens
        self.num_documents, expected = len(self._index.documents) - 1, self.num_tokens * self.dtype.itemsize
        if self._file.size != expected:
            what = f"expected {expected:,} bytes ({self.num_tokens:,} {self.dtype} tokens), got {self._file.size:,}"
            raise UserError(204, what, "copy both files again or rebuild them", where=self.bin_path)
        self._mask = LossMask(mask, self.num_tokens) if (mask := mask_path(prefix)).exists() else None
        self.mask_digest = self._mask and self._mask.digest

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return token ids [stop - start]."""
        assert 0 <= start <= stop <= self.num_tokens
        size = self.dtype.itemsize
        return self._file.read(start * size, (stop - start) * size).view(self.dtype)

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """Return where documents [first, stop) start, in tokens from the start of the data: int64."""
        return self._index.offsets(first, stop)

    def scored(self, start: int, stop: int) -> np.ndarray:
        """Return which tokens [start, stop) count in the loss."""
        return np.ones(stop - start, bool) if self._mask is None else self._mask.read(start, stop)


def refuse_missing(prefix: str | Path) -> None:
    """Refuse a data set with a missing file. Raises UserError 201."""
    bin_path, idx_path = file_pair(prefix)
    for path in (idx_path, bin_path):
        if not path.exists():
            raise UserError(201, f"no such token file{looked_up(path)}", _how_to_make(Path(prefix)), where=path)


def _how_to_make(prefix: Path) -> str:
    if prefix.suffix in (".ds", ".npy", ".bin") and prefix.exists() and not prefix.with_suffix(".idx").exists():
        return f"convert this file of another project: `megazero merge {prefix} --output PREFIX`"
    if prefix.suffix in (".bin", ".idx"):
        return f"give the prefix without {prefix.suffix}"
    if "data/quickstart" in prefix.as_posix():
        return "run `make data` in a checkout, or make token files from your text with `megazero preprocess`"
    return f"run `megazero preprocess --input TEXT --tokenizer MODEL --output {prefix}`"


class IndexedDatasetWriter:
    """A writer of a pair of files; a reader sees the whole pair or nothing.

    All files are written under unique temporary names in the target folder, flushed to the disk, and renamed, .idx
    last: a reader accepts no pair without .idx. An old pair keeps working until then; its .idx is removed before its
    .bin is replaced, so that an old index never meets new tokens. Leaving the `with` block by an exception removes the
    temporary files; a killed process leaves them, named `NAME.bin.tmp-...`, which no reader opens.

        with IndexedDatasetWriter("data/train", np.uint16) as writer:
            writer.append(ids)          # any number of times per document
            writer.end_document()

    Args:
        prefix, dtype: the prefix of the files and the type of the ids.
        masked: the data set has a mask; False: it has none, and an old one is removed.

    Attributes:
        num_tokens, num_documents: written so far.
        mask_digest: the digest of the mask, once the files are complete; None: they have no mask.

    Raises:
        UserError: 208 if the system refuses to write (disk full, no permission).
    """

    def __init__(self, prefix: str | Path, dtype: type[np.integer] | np.dtype, *, masked: bool = False):
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, kind in DTYPE_CODES.items() if np.dtype(kind) == np.dtype(dtype))
        self._bin, self._idx = file_pair(prefix)
        self._mask_path, self._masked = mask_path(prefix), masked
        appearing = ([self._mask_path] if masked else []) + [self._bin, self._idx]  # in this order
        self._temporary = {path: temporary_name(path) for path in appearing}
        self._open = ExitStack()
        self._lengths = array("i")  # per sequence; the writer holds 12 bytes per document in memory
        self._documents = array("q", [0])
        self._open_length = 0  # tokens that are in no document yet
        self.num_tokens, self.mask_digest = 0, None

    @property
    def num_documents(self) -> int:
        """Return the number of documents so far."""
        return len(self._documents) - 1

    def __enter__(self) -> "IndexedDatasetWriter":
        with writing(self._bin):
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open.enter_context(self._temporary[self._bin].open("xb"))
            self._mask = None
            if self._masked:
                self._mask = LossMaskWriter(self._open.enter_context(self._temporary[self._mask_path].open("xb")))
        return self

    def append(self, tokens: np.ndarray, scored: np.ndarray | None = None) -> None:
        """Add ids [n], of any integer type.

        Args:
            scored: bool [n], which of the ids are trained on; None: all of them.
        """
        ids = tokens.astype(self.dtype, copy=False)
        assert np.array_equal(ids, tokens), f"ids do not fit {self.dtype}"
        with writing(self._bin):
            self._file.write(ids.tobytes())
            if self._mask is not None:
                self._mask.append(np.ones(len(ids), bool) if scored is None else scored)
        self.num_tokens += len(ids)
        self._open_length += len(ids)

    def end_document(self, length: int | None = None) -> None:
        """End a document, which must hold at least one token.

        Args:
            length: the number of its tokens, among those that are in no document yet; None: all of them.
        """
        length = self._open_length if length is None else length
        assert 0 < length <= self._open_length, "a document needs at least one token"
        self._open_length -= length
        while length > MAX_SEQUENCE:
            self._lengths.append(MAX_SEQUENCE)
            length -= MAX_SEQUENCE
        self._lengths.append(length)
        self._documents.append(len(self._lengths))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert not self._open_length, "the last document was not ended"
                with writing(self._bin):
                    self._publish()
        finally:
            with suppress(OSError):  # on a full disk, close fails again when it flushes its buffer
                self._open.close()
            for path in self._temporary.values():
                path.unlink(missing_ok=True)

    def _publish(self) -> None:
        flush(self._file)
        lengths = np.array(self._lengths, "<i4")
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with self._temporary[self._idx].open("xb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._documents)))
            for values in (lengths, pointers.astype("<i8"), np.array(self._documents, "<i8")):
                file.write(values.tobytes())
            flush(file)
        self.mask_digest = None if self._mask is None else self._mask.finish()
        self._idx.unlink(missing_ok=True)
        if self._mask is None:
            self._mask_path.unlink(missing_ok=True)
        for target, temporary in self._temporary.items():
            temporary.replace(target)
        flush_folder(self._bin.parent)
