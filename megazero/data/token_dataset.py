"""Define what every kind of token files offers: ids end to end, documents, and which tokens are trained on.

Readers of the formats (`open_dataset` in dialects.py) differ in where ids lie, of which type they are, and how they
know where documents end. Everything behind them (split, windows, packing, inspect, merge) sees this.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megazero.data.data_file import DataFile, FileIdentity
from megazero.data.document_offsets import DocumentOffsets
from megazero.data.remembered import Memory


class TokenIds(NamedTuple):
    """The facts of a vocabulary that token files without an index do not tell.

    Attributes:
        vocab_size: ids lie in [0, vocab_size).
        eod: the id that ends a document.
    """

    vocab_size: int
    eod: int


GetTokenIds = Callable[[], TokenIds | None]  # called where a format needs them; None: there is no tokenizer


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
        index: the file that says where documents end; None: that of the ids.

    Attributes:
        prefix: the path that was given.
        bin_path: the file of the ids.
        dtype: the integer type of the ids.
        num_documents, num_tokens: counts.
        document_offsets: in tokens; document d is tokens [offsets[d], offsets[d + 1]).
        mask: which tokens are trained on; None: all are.
        memory: what was found out about it in earlier openings; None: it is too small for that.
    """

    def __init__(
        self,
        prefix: str | Path,
        file: DataFile,
        dtype: np.dtype,
        offsets: DocumentOffsets,
        *,
        at: int = 0,
        index: DataFile | None = None,
        mask: Mask | None = None,
        memory: Memory | None = None,
    ):
        self.prefix, self.bin_path, self.dtype = Path(prefix), file.path, dtype
        self.document_offsets, self.mask, self.memory = offsets, mask, memory
        self.num_documents, self.num_tokens = offsets.num_documents, offsets.num_tokens
        self._file, self._at, self._index = file, at, index or file

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the file, in the file's type.

        Raises:
            UserError: 204, the file has become shorter since it was opened; 201, the disk does not give them.
        """
        assert 0 <= start <= stop <= self.num_tokens
        return self._file.array(self.dtype, self._at, start, stop)

    @property
    def identity(self) -> tuple[FileIdentity, FileIdentity]:
        """Return the numbers by which the files of the ids, and of documents' ends, are told from others."""
        return self._file.identity, self._index.identity

    def place_of(self, document: int) -> tuple[Path, int]:
        """Return (file of the tokens, document in it) of a document."""
        return self.bin_path, document

    def locate(self, token: int) -> tuple[int, int]:
        """Return (document, position in it) of the token at this index of the file."""
        document = self.document_offsets.find(token)
        return document, token - self.document_offsets[document]
