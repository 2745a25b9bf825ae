"""Token files as split, windows, packing, inspect and merge see them: ids end to end, documents, a mask.

A pair of files (`indexed_dataset.py`), a folder of pairs (`joined.py`), and files of other projects that merge.py
copies are all of this kind.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from pathlib import Path
from typing import Protocol, overload

import numpy as np

from megazero.data.data_file import DataFile


class DocumentOffsets(ABC):
    """The token offset at which each document begins, and behind them where the last one ends; they rise.

    They are read where they are asked for, as 10^9 documents are 8 GB of offsets.

    Args:
        num_documents: of the files.
        num_tokens: of the files, the last offset.
    """

    def __init__(self, num_documents: int, num_tokens: int):
        self.num_documents, self.num_tokens = num_documents, num_tokens

    def __len__(self) -> int:
        return self.num_documents + 1

    @overload
    def __getitem__(self, which: int) -> int: ...
    @overload
    def __getitem__(self, which: slice) -> np.ndarray: ...
    def __getitem__(self, which: int | slice) -> int | np.ndarray:
        """Return the offset of a document, or those of a slice without steps: int64."""
        if isinstance(which, slice):
            first, stop, _ = which.indices(len(self))
            return self._read(first, max(first, stop))
        return int(self._read(which, which + 1)[0])

    @abstractmethod
    def _read(self, first: int, stop: int) -> np.ndarray:
        """Return offsets [first, stop), int64."""


class HeldOffsets(DocumentOffsets):
    """Offsets in memory, int64 [documents + 1]."""

    def __init__(self, offsets: np.ndarray):
        super().__init__(len(offsets) - 1, int(offsets[-1]))
        self._offsets = offsets

    def _read(self, first: int, stop: int) -> np.ndarray:
        return self._offsets[first:stop]


class Mask(Protocol):
    """The protocol of a mask, which says which tokens are trained on.

    Attributes:
        digest: of all of it.
    """

    digest: str

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return which of tokens [start, stop) count: bool."""
        ...


class TokenDataset:
    """Token files, read-only and checked.

    Args:
        file, at: the ids, from byte `at` on.

    Attributes:
        prefix: the path that was given.
        bin_path: the file of the ids.
        dtype: the integer type of the ids.
        num_documents, num_tokens: counts.
        document_offsets: in tokens; document d is tokens [offsets[d], offsets[d + 1]).
        mask: which tokens are trained on; None: all are.
    """

    def __init__(
        self,
        prefix: str | Path,
        file: DataFile,
        dtype: np.dtype,
        offsets: DocumentOffsets,
        *,
        at: int = 0,
        mask: Mask | None = None,
    ):
        self.prefix, self.bin_path, self.dtype = Path(prefix), file.path, dtype
        self.document_offsets, self.mask = offsets, mask
        self.num_documents, self.num_tokens = offsets.num_documents, offsets.num_tokens
        self._file, self._at = file, at

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the file, in the file's type.

        Raises:
            UserError: 204, the file has become shorter since it was opened; 201, the disk does not give them.
        """
        assert 0 <= start <= stop <= self.num_tokens
        size = self.dtype.itemsize
        return self._file.read(self._at + start * size, (stop - start) * size).view(self.dtype)

    def shard_of(self, document: int) -> tuple["TokenDataset", int]:
        """Return the pair of files that holds a document, and the document's number in it."""
        return self, document

    def locate(self, token: int) -> tuple[int, int]:
        """Return (document, position in it) of the token at this index of the file."""
        document = bisect_right(self.document_offsets, token) - 1
        return document, token - self.document_offsets[document]
