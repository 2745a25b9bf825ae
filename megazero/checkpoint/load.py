"""Load a checkpoint written on any grid: every rank reads the bytes it needs and verifies each block before its use.

A rank needs a list of parameter pieces, and a file holds a list of pieces. Their overlaps are the bytes to read;
reading in file order touches each block once. A block is verified before any of its bytes is used (`shard.py`), so
the ranks together verify all bytes that are used.
The manifest alone locates the tensors: it has the hash of every block, and its own digest.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from megazero.base.doing import doing
from megazero.checkpoint.manifest import DTYPES, Logical, Manifest
from megazero.checkpoint.pieces import Piece, ShardState
from megazero.checkpoint.shard import ShardReader, open_shard
from megazero.comm.home import PagedHome


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy of values of `dtype` from byte `at` of file `shard` to `into`, a meta tensor for values on `disks`."""

    shard: int
    at: int
    into: Tensor
    dtype: torch.dtype
    disks: PagedHome | None = None

    def fill(self, reader: ShardReader) -> None:
        """Read the bytes into the tensor; if it is on disks, at most `disks.window` elements at a time."""
        if self.disks is None:
            _fill(reader, self.at, self.into, self.dtype)
            return
        begins, window, first = int(self.into.storage_offset()), self.disks.window, 0
        while first < len(self.into):  # split at window boundaries
            stop = min(first + window - (begins + first) % window, len(self.into))
            values = torch.empty(stop - first, dtype=self.into.dtype)
            _fill(reader, self.at + first * self.dtype.itemsize, values, self.dtype)
            self.disks.send(values, self.into[first:stop], "checkpoint")
            first = stop


def load_tensors(
    folder: Path, manifest: Manifest, holdings: Sequence[ShardState], *, stop: Callable[[], bool] = lambda: False
) -> int:
    """Fill a rank's tensors; return the number of bytes read.

    Args:
        manifest: of the folder, verified; its tensors have the shapes of the holdings' tensors, or fewer rows. Rows
            missing in the checkpoint keep their values. Values are converted to the dtype of the holdings' tensors.
        holdings: the state to fill; kinds that the manifest lacks are filled with zeros.
        stop: polled while reading; True: give up, the tensors are not needed.

    Raises:
        UserError: 410, a file is damaged; the tensors may be partly filled and must not be used.
        ReadingStoppedError: `stop` returned True.
    """
    copies: list[list[_Copy]] = [[] for _ in manifest.files]
    for holding in holdings:  # an earlier attempt with another step may have filled them
        saved = [{*manifest.kinds_of(piece.name)} for piece in holding.pieces]
        for kind, tensor in holding.tensors.items():
            if all(kind in kinds for kinds in saved):
                continue
            if holding.disks is None:
                tensor.zero_()
            else:
                holding.disks.clear(tensor)
    for copy in _copies(manifest, holdings):
        copies[copy.shard].append(copy)
    read = 0
    needed = [index for index, of_file in enumerate(copies) if of_file]
    for index, reader in opened(folder, manifest, needed, f"reading {folder}", stop):
        for copy in sorted(copies[index], key=lambda copy: copy.at):
            copy.fill(reader)
        read += reader.bytes_read
    for disks in {holding.disks for holding in holdings if holding.disks is not None}:
        disks.settle()  # raise a disk's fault here, not in training
    return read


def opened(
    folder: Path, manifest: Manifest, shards: Collection[int], what: str, stop: Callable[[], bool]
) -> Iterator[tuple[int, ShardReader]]:
    """Yield (number, reader) for some files of a checkpoint, in the order of `shards`.

    Args:
        shards: the numbers of the files.
        what: the activity to show as progress.
        stop: polled while reading; True: raise ReadingStoppedError.

    Raises:
        UserError: 410, a file is damaged.
    """
    with doing(what, len(shards)) as progress:
        for index in shards:
            with open_shard(folder, manifest.files[index], stop) as reader:
                yield index, reader
            progress.advance()


def _copies(manifest: Manifest, holdings: Sequence[ShardState]) -> Iterator[_Copy]:
    for holding in holdings:
        for wanted in holding.pieces:
            kinds = manifest.kinds_of(wanted.name)
            for shard, start, stop, *places in _overlapping(manifest.tensors[wanted.name], wanted):
                first, last = max(start, wanted.start), min(stop, wanted.stop)
                at = wanted.at - wanted.start
                for kind, place in zip(kinds, places, strict=True):
                    if kind in holding.tensors:
                        dtype = DTYPES[manifest.dtype_of(wanted.name, kind)]
                        into = holding.tensors[kind][at + first : at + last]
                        yield _Copy(shard, place + (first - start) * dtype.itemsize, into, dtype, holding.disks)


def _overlapping(logical: Logical, wanted: Piece) -> Iterator[list[int]]:
    for index in range(bisect_right(logical.pieces, wanted.start, key=itemgetter(1)) - 1, len(logical.pieces)):
        piece = logical.pieces[index]
        if piece[1] >= wanted.stop:
            return
        if piece[2] > wanted.start:  # elements after the last piece do not exist
            yield piece


def _fill(reader: ShardReader, at: int, into: Tensor, dtype: torch.dtype) -> None:
    """Fill a tensor in memory with values of `dtype` that start at byte `at` of a file."""
    values = into if into.dtype == dtype else torch.empty(into.shape, dtype=dtype)
    target = values.view(torch.uint8)
    for position, data in reader.read(at, at + len(target)):
        target[position - at : position - at + len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    if values is not into:
        into.copy_(values)
