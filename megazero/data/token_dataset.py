"""Token files as split, windows, packing, inspect and merge see them: ids end to end, documents, a mask.

A pair of files (`indexed_dataset.py`), a folder of pairs (`joined.py`), and files of other projects that merge.py
copies are all of this kind.
"""

from pathlib import Path
from typing import Protocol

import numpy as np

from megazero.data.data_file import DataFile
from megazero.data.document_offsets import DocumentOffsets


class Mask(Protocol):
    """The protocol of what says which tokens are trained on.

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
        return self._file.array(self.dtype, self._at, start, stop)

    def place_of(self, document: int) -> tuple[Path, int]:
        """Return (file of the tokens, document in it) of a document."""
        return self.bin_path, document

    def locate(self, token: int) -> tuple[int, int]:
        """Return (document, position in it) of the token at this index of the file."""
        document = self.document_offsets.find(token)
        return document, token - self.document_offsets[document]
