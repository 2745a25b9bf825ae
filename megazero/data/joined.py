"""Read a folder of token files, its shards, as one data set: the shards' documents one after the other.

A shard is whole when its index is there: X.idx with X.bin. Writers put the index last, and ours by renaming it; names
that begin with a dot or have `.tmp` in them, and files without an index, are not there yet.
"""

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.indexed_dataset import refuse_missing as refuse_missing_pair
from megazero.data.token_dataset import DocumentOffsets, Mask, TokenDataset


def is_folder(path: str | Path) -> bool:
    """Return whether a path names a folder of shards: it is a folder, and not the prefix of a pair."""
    found = Path(path)
    return found.is_dir() and not Path(f"{found}.idx").exists()


def open_files(path: str | Path) -> TokenDataset:
    """Open a pair of token files, or a folder of them.

    Raises:
        UserError: 201 to 204, 225: they are missing or damaged; 228, a folder without a whole shard.
    """
    return JoinedDataset(Path(path)) if is_folder(path) else IndexedDataset(path)


def refuse_missing(path: str | Path) -> None:
    """Refuse token files, or shards, that are not there. Raises UserError 201, 228."""
    if is_folder(path):
        shard_names(Path(path))
    else:
        refuse_missing_pair(path)


def shard_names(folder: Path) -> list[str]:
    """Return the names of whole shards of a folder, sorted. Raises UserError 201, it cannot be read; 228, of none."""
    try:
        found = {name for path in folder.iterdir() if not (name := path.name).startswith(".") and ".tmp" not in name}
    except OSError as error:
        do = "give a folder of token files"
        raise UserError(201, f"cannot be read: {error.strerror}{looked_up(folder)}", do, where=folder) from error
    pairs = {name.removesuffix(".idx") for name in found if name.endswith(".idx")}
    names = {name for name in pairs if f"{name}.bin" in found}
    if not names:
        what = f"expected shards, X.bin with X.idx, got none of {len(found):,} names"
        raise UserError(228, what, "wait for the first one, or give another folder", where=folder)
    return sorted(names)


class JoinedDataset(TokenDataset):
    """The shards of a folder, one after the other, as one data set. Each keeps two or three descriptors open.

    Args:
        folder: where they are.

    Attributes:
        shards, names: the shards in their order, and their names.

    Raises:
        UserError: 201 to 204, 225: a shard is missing or damaged; 228, there is none, or they store ids in
            different types.
    """

    def __init__(self, folder: Path):
        self.names = shard_names(folder)
        self.shards = list[TokenDataset]()
        _raise_descriptor_limit()
        with doing(f"opening the shards of {folder}", len(self.names)) as progress:
            for name in self.names:
                self.shards.append(IndexedDataset(folder / name))
                progress.advance()
        first = self.shards[0]
        for shard in self.shards:
            if shard.dtype != first.dtype:
                what = f"stores {shard.dtype}, but {first.bin_path.name} stores {first.dtype}"
                raise UserError(228, what, "tokenize all shards alike", where=shard.bin_path)
        self._offsets = _JoinedOffsets([shard.document_offsets for shard in self.shards])
        masked = any(shard.mask for shard in self.shards)
        mask = _JoinedMask(self.shards, self._offsets.tokens_before) if masked else None
        super().__init__(folder, first._file, first.dtype, self._offsets, mask=mask)
        self.bin_path = folder

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of all shards, in their type. Raises as that of a shard."""
        assert 0 <= start <= stop <= self.num_tokens
        return _pieces(
            start, stop, self._offsets.tokens_before, lambda k, *span: self.shards[k].read(*span), self.dtype
        )

    def shard_of(self, document: int) -> tuple[TokenDataset, int]:
        """Return the shard that holds a document, and the document's number in it."""
        k = int(np.searchsorted(self._offsets.documents_before, document, side="right")) - 1
        return self.shards[k], document - int(self._offsets.documents_before[k])

    def document_of(self, shard: str, document: int) -> int | None:
        """Return the number of a document of a shard among those of all; None: there is none."""
        k = self.names.index(shard) if shard in self.names else None
        if k is None or document >= self.shards[k].num_documents:
            return None
        return int(self._offsets.documents_before[k]) + document


def _raise_descriptor_limit() -> None:
    """Raise the soft limit on open files, which is 1,024 on many systems, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the system has a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


class _JoinedOffsets(DocumentOffsets):
    """The offsets of documents of all shards."""

    def __init__(self, shards: Sequence[DocumentOffsets]):
        self._shards = shards
        self.documents_before = np.cumsum([0, *(shard.num_documents for shard in shards)])
        self.tokens_before = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        super().__init__(int(self.documents_before[-1]), int(self.tokens_before[-1]))

    def _read(self, first: int, stop: int) -> np.ndarray:
        def of(k: int, begin: int, end: int) -> np.ndarray:
            return self._shards[k][begin:end] + self.tokens_before[k]

        inside = _pieces(first, min(stop, self.num_documents), self.documents_before, of, np.dtype(np.int64))
        return inside if stop <= self.num_documents else np.append(inside, self.num_tokens)


class _JoinedMask:
    """The masks of all shards; of those without one every token counts."""

    def __init__(self, shards: Sequence[TokenDataset], tokens_before: np.ndarray):
        self._masks: list[Mask | None] = [shard.mask for shard in shards]
        self._tokens_before = tokens_before
        told = " ".join("-" if mask is None else mask.digest for mask in self._masks)
        self.digest = xxhash.xxh3_64_hexdigest(told.encode())

    def read(self, start: int, stop: int) -> np.ndarray:
        def of(k: int, begin: int, end: int) -> np.ndarray:
            mask = self._masks[k]
            return np.ones(end - begin, bool) if mask is None else mask.read(begin, end)

        return _pieces(start, stop, self._tokens_before, of, np.dtype(bool))


def _pieces(
    start: int, stop: int, before: np.ndarray, of: Callable[[int, int, int], np.ndarray], dtype: np.dtype
) -> np.ndarray:
    """Return [start, stop) of what lies in shards end to end.

    Args:
        before: how much lies before each shard, and in all, int64 [shards + 1].
        of: returns a shard's own [begin, end), by its place.
    """
    found = []
    k = int(np.searchsorted(before, start, side="right")) - 1
    while start < stop:
        end = min(stop, int(before[k + 1]))
        if start < end:
            found.append(of(k, start - int(before[k]), end - int(before[k])))
        start, k = max(start, end), k + 1
    return np.concatenate(found) if found else np.empty(0, dtype)
