"""Load a checkpoint of any grid: every rank reads what it needs, and verifies each block before it uses it.

A rank has a list of pieces of parameters, and a file has another. Where they overlap there are bytes to read, and
reading in the order of the files touches each block once. A block is verified before anything of it is used
(`shard.py`), so every rank verifies what it reads and all together everything that is used.
The manifest alone says where each tensor is: it has the hash of every block, and its own digest.
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
    """A copy of values of a dtype from byte `at` of file `shard` to `into`, which may stand for values on disks."""

    shard: int
    at: int
    into: Tensor
    dtype: torch.dtype
    disks: PagedHome | None = None

    def fill(self, reader: ShardReader) -> None:
        """Read the bytes into the tensor; on disks into one window of it after the other."""
        if self.disks is None:
            _fill(reader, self.at, self.into, self.dtype)
            return
        begins, window, first = int(self.into.storage_offset()), self.disks.window, 0
        while first < len(self.into):  # cut where windows begin
            stop = min(first + window - (begins + first) % window, len(self.into))
            values = torch.empty(stop - first, dtype=self.into.dtype)
            _fill(reader, self.at + first * self.dtype.itemsize, values, self.dtype)
            self.disks.send(values, self.into[first:stop], "checkpoint")
            first = stop


def load_tensors(
    folder: Path,
    manifest: Manifest,
    holdings: Sequence[ShardState],
    *,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Fill a rank's tensors; return how many bytes were read.

    Args:
        manifest: of the folder, verified; its tensors have the shapes of the holdings', or fewer rows, and a dtype that
            converts to theirs without rounding. Rows that they lack stay as they are.
        holdings: the state to fill, in the kinds that it has; with zeros where the manifest does not have the kind.
        stop: polled while reading; True: give up, the tensors are not needed any more.

    Raises:
        UserError: 410, a file is damaged; the tensors filled by then must not be used.
        ReadingStoppedError: `stop` was true.
    """
    copies: list[list[_Copy]] = [[] for _ in manifest.files]
    for holding in holdings:  # what a step tried before may have left
        for kind in holding.tensors.keys() - set(manifest.kinds):
            if holding.disks is None:
                holding.tensors[kind].zero_()
            else:
                holding.disks.clear(holding.tensors[kind])
    for copy in _copies(manifest, holdings):
        copies[copy.shard].append(copy)
    read = 0
    needed = [index for index, of_file in enumerate(copies) if of_file]
    for index, reader in opened(folder, manifest, needed, f"reading {folder}", stop):
        for copy in sorted(copies[index], key=lambda copy: copy.at):
            copy.fill(reader)
        read += reader.bytes_read
    for disks in {holding.disks for holding in holdings if holding.disks is not None}:
        disks.settle()  # a fault of a disk is one of loading
    return read


def opened(
    folder: Path, manifest: Manifest, shards: Collection[int], what: str, stop: Callable[[], bool]
) -> Iterator[tuple[int, ShardReader]]:
    """Yield the number and a reader of some files of a checkpoint, in their order.

    Args:
        what: is done, for the display of progress.
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
            dtype, kinds = DTYPES[manifest.dtype_of(wanted.name)], manifest.kinds_of(wanted.name)
            for shard, start, stop, *places in _overlapping(manifest.tensors[wanted.name], wanted):
                first, last = max(start, wanted.start), min(stop, wanted.stop)
                at = wanted.at - wanted.start
                for kind, place in zip(kinds, places, strict=True):
                    if kind in holding.tensors:
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
    """Read as many values of a dtype as there are, from byte `at` of a file on, into a tensor in memory."""
    values = into if into.dtype == dtype else torch.empty(into.shape, dtype=dtype)
    target = values.view(torch.uint8)
    for position, data in reader.read(at, at + len(target)):
        target[position - at : position - at + len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    if values is not into:
        into.copy_(values)
