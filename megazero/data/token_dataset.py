"""The interface of token files for split, windows, packing, inspect and merge: ids end to end, documents, a mask.

A pair of files (`indexed_dataset.py`), a folder of pairs (`joined.py`), and files of other projects that merge.py
copies all implement it.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from pathlib import Path

import numpy as np


class TokenDataset(ABC):
    """The base class of token files, read-only and checked.

    Documents, tokens and the mask are read on demand: 10^9 documents have 8 GB of offsets.

    Attributes:
        prefix: the path that was given.
        bin_path: the file of the ids.
        dtype: the integer type of the ids.
        num_documents, num_tokens: counts.
        mask_digest: the digest of the mask of the tokens that are trained on; None: all are.
    """

    prefix: Path
    bin_path: Path
    dtype: np.dtype
    num_documents: int
    num_tokens: int
    mask_digest: str | None = None

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the file, in the file's type.

        Raises:
            UserError: 204, the file has become shorter since it was opened; 201, the tokens cannot be read.
        """

    @abstractmethod
    def offsets(self, first: int, stop: int) -> np.ndarray:
        """Return where documents [first, stop) start, in tokens: int64; the one after the last starts at the end."""

    @abstractmethod
    def scored(self, start: int, stop: int) -> np.ndarray:
        """Return which of the tokens [start, stop) are trained on: bool. Raises as `read`, or UserError 225."""

    def bounds(self, document: int) -> tuple[int, int]:
        """Return (start, stop) of a document: the index of its first token in the file, and that after its last."""
        start, stop = self.offsets(document, document + 2).tolist()
        return start, stop

    def shard_of(self, document: int) -> tuple["TokenDataset", int]:
        """Return the pair of files that holds a document, and the document's number in it."""
        return self, document

    def locate(self, token: int) -> tuple[int, int]:
        """Return (document, position in it) of the token at this index of the file."""
        document = bisect_right(range(self.num_documents + 1), token, key=lambda d: self.offsets(d, d + 1)[0]) - 1
        return document, token - int(self.offsets(document, document + 1)[0])
