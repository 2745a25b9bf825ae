"""Read a folder of token files, its shards, as one data set: the shards' documents one after the other.

A shard is complete when its index exists: X.idx with X.bin. Writers create the index last; ours renames it into place.
Names that begin with a dot or contain `.tmp`, and files without an index, are ignored as incomplete.
"""

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.indexed_dataset import refuse_missing as refuse_missing_pair
from megazero.data.token_dataset import TokenDataset


def is_folder(path: str | Path) -> bool:
    """Return whether a path names a folder of shards: it is a folder, and not the prefix of a pair."""
    found = Path(path)
    return found.is_dir() and not Path(f"{found}.idx").exists()


def open_files(path: str | Path) -> TokenDataset:
    """Open a pair of token files, or a folder of them.

    Raises:
        UserError: 201 to 204, 225: they are missing or damaged; 228, a folder without a complete shard.
    """
    return JoinedDataset(Path(path)) if is_folder(path) else IndexedDataset(path)


def refuse_missing(path: str | Path) -> None:
    """Refuse missing token files, or a folder without shards. Raises UserError 201, 228."""
    if is_folder(path):
        shard_names(Path(path))
    else:
        refuse_missing_pair(path)


def shard_names(folder: Path) -> list[str]:
    """Return the sorted names of a folder's complete shards. Raises UserError 201: cannot be read; 228: no shard."""
    try:
        found = {name for path in folder.iterdir() if not (name := path.name).startswith(".") and ".tmp" not in name}
    except OSError as error:
        do = "give a folder of token files"
        raise UserError(201, f"cannot be read: {error.strerror}{looked_up(folder)}", do, where=folder) from error
    pairs = {name.removesuffix(".idx") for name in found if name.endswith(".idx")}
    names = {name for name in pairs if f"{name}.bin" in found}
    if not names:
        what = f"expected shards, X.bin with X.idx, found none among {len(found):,} files"
        raise UserError(228, what, "wait for the first shard, or give another folder", where=folder)
    return sorted(names)


class JoinedDataset(TokenDataset):
    """The shards of a folder, one after the other, as one data set. Each keeps two or three descriptors open.

    Args:
        folder: the folder of the shards.

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
                raise UserError(228, what, "tokenize all shards with the same tokenizer", where=shard.bin_path)
        self._documents_before = np.cumsum([0, *(shard.num_documents for shard in self.shards)])
        self._tokens_before = np.cumsum([0, *(shard.num_tokens for shard in self.shards)])
        self.prefix = self.bin_path = folder
        self.dtype, digests = first.dtype, [shard.mask_digest for shard in self.shards]
        self.num_documents, self.num_tokens = int(self._documents_before[-1]), int(self._tokens_before[-1])
        if any(digests):
            self.mask_digest = xxhash.xxh3_64_hexdigest(" ".join(digest or "-" for digest in digests).encode())

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return token ids [stop - start], from all shards that hold them."""
        assert 0 <= start <= stop <= self.num_tokens
        parts = (self.shards[k].read(*span) for k, *span in _spans(self._tokens_before, start, stop))
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """Return where documents [first, stop) start, in tokens from the start of the first shard: int64."""
        spans = _spans(self._documents_before, first, min(stop, self.num_documents))
        parts = (self.shards[k].offsets(*span) + self._tokens_before[k] for k, *span in spans)
        return np.concatenate([*parts, np.full(max(0, stop - self.num_documents), self.num_tokens)])

    def scored(self, start: int, stop: int) -> np.ndarray:
        """Return which tokens [start, stop) count in the loss."""
        parts = (self.shards[k].scored(*span) for k, *span in _spans(self._tokens_before, start, stop))
        return np.concatenate([np.empty(0, bool), *parts])

    def shard_of(self, document: int) -> tuple[TokenDataset, int]:
        """Return the shard that holds a document, and the document's number in it."""
        k = int(np.searchsorted(self._documents_before, document, side="right")) - 1
        return self.shards[k], document - int(self._documents_before[k])


def _raise_descriptor_limit() -> None:
    """Raise the soft limit on open files, which is 1,024 on many systems, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the system may have a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


def _spans(before: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the shard, begin and end in it) of the parts of [start, stop) in shards that are end to end.

    Args:
        before: the number of items before each shard, and in all, int64 [shards + 1].
    """
    for k in range(int(np.searchsorted(before, start, side="right")) - 1, int(np.searchsorted(before, stop))):
        begin, end = max(start, int(before[k])), min(stop, int(before[k + 1]))
        if begin < end:
            yield k, begin - int(before[k]), end - int(before[k])
