"""Choose the documents of a run, and join them to one stream of tokens.

Training and validation are split by whole documents, so that no validation text is seen in training. The side of a
document depends only on its number and the fraction: not on the seed, the sequence length or the number of ranks. So
two runs with different seeds are validated on the same text, and appended documents do not move the others.

A `TokenStream` joins the chosen documents, in file order, end to end. Nothing is copied: a read finds its documents and
reads its tokens from the file. Documents are handled in blocks of 16,384. Memory holds two numbers per block (the
documents and tokens chosen before it), which are counted once, and the few blocks used last. So 10^9 documents need a
megabyte.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.data.choice import Side
from megazero.data.token_dataset import TokenDataset

BLOCK = 1 << 14  # documents
_CACHED = 64  # blocks
_SAMPLED = 256  # tokens in a stream's digest
_WORTH = 64  # the most tokens to read per wanted token; above this, each run of wanted tokens is read separately


def split_streams(dataset: TokenDataset, fraction: float) -> tuple["TokenStream", "TokenStream"]:
    """Return the streams of the (training, validation) documents.

    Raises:
        UserError: 206 if one side would be empty, or the fraction is not between 0 and 1.
    """
    held_out = TokenStream(dataset, Side(fraction, valid=True))
    num_valid = held_out.num_documents
    if num_valid in (0, dataset.num_documents):
        what = f"a fraction of {fraction} puts {num_valid} of {dataset.num_documents} documents into validation"
        raise UserError(206, what, "set data.valid to another fraction, such as 0.2, or to validation token files")
    return TokenStream(dataset, Side(fraction, valid=False), rest_of=held_out), held_out


def document_lengths(starts: np.ndarray) -> tuple[int, ...]:
    """Return the lengths of a window's documents; `starts`, bool, is True where one begins (optional for the first)."""
    return tuple(np.diff(np.flatnonzero(starts[1:]) + 1, prepend=0, append=len(starts)).tolist())


class Block(NamedTuple):
    """The chosen documents of a block.

    Attributes:
        ordinal: the number of documents chosen before them.
        numbers: the numbers of the documents in the file, int64 [n].
        first_tokens: where they begin in the file, int64 [n].
        starts: where they begin in the stream, and where the last one ends, int64 [n + 1].
    """

    ordinal: int
    numbers: np.ndarray
    first_tokens: np.ndarray
    starts: np.ndarray


class TokenStream:
    """The chosen documents of a data set, in file order, as one sequence of `num_tokens` tokens.

    Args:
        dataset: the data set that holds them.
        side: chooses the documents; None: all.
        rest_of: the stream of all documents that `side` does not choose, if known: it saves counting; None: count.
    """

    def __init__(self, dataset: TokenDataset, side: Side | None = None, rest_of: "TokenStream | None" = None):
        self.dataset, self._side = dataset, side
        self._block = lru_cache(_CACHED)(self._make)  # threads may call it at the same time
        if rest_of is not None:
            found = _before_blocks(dataset, None) - (rest_of._ordinals, rest_of._starts)
        else:
            found = _before_blocks(dataset, side)
        self._ordinals, self._starts = found  # documents and tokens chosen before each block, and before the end
        self.num_documents, self.num_tokens = int(self._ordinals[-1]), int(self._starts[-1])

    def digest(self) -> str:
        """Return a digest of the positions of its documents in the file, of some tokens, and of the mask, if any."""
        some = np.linspace(0, self.num_tokens - 1, min(_SAMPLED, self.num_tokens)).astype(np.int64)
        tokens = _gathered(self.dataset.read, self._spread(some)[1]).astype(np.int64)
        digest = xxhash.xxh3_64()
        for block in self.blocks("hashing the documents"):
            digest.update(block.first_tokens.tobytes())
        for block in self.blocks("hashing the documents"):
            digest.update(block.starts[:-1].tobytes())
        mask = (self.dataset.mask_digest or "").encode()
        for part in (np.array([self.num_tokens]).tobytes(), tokens.tobytes(), mask):
            digest.update(part)
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, ordinals of their documents) of tokens [start, stop): int64 [stop - start] each.

        The ordinal counts the chosen documents from 0; a change of ordinal is a document boundary.
        """
        assert 0 <= start <= stop <= self.num_tokens
        ordinals, in_file = self._spread(np.arange(start, stop))
        return _gathered(self.dataset.read, in_file).astype(np.int64), ordinals

    def scored(self, start: int, stop: int) -> np.ndarray:
        """Return which of tokens [start, stop) are trained on: bool."""
        if self.dataset.mask_digest is None:
            return np.ones(stop - start, bool)
        return _gathered(self.dataset.scored, self._spread(np.arange(start, stop))[1])

    def locate(self, position: int) -> tuple[int, int]:
        """Return (document number in the file, position in the document) of a token of the stream, for messages."""
        return self.dataset.locate(int(self._spread(np.array([position]))[1][0]))

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each document, int64 [num_documents]: for a huge data set more than memory holds."""
        return np.concatenate([np.empty(0, np.int64), *(np.diff(block.starts) for block in self.blocks())])

    def blocks(self, what: str = "looking through the documents") -> Iterator[Block]:
        """Yield all blocks, one after the other.

        Args:
            what: the caller's work on them, for the progress display.
        """
        with doing(f"{what} of {self.dataset.prefix}", self.dataset.num_documents) as progress:
            for number in range(len(self._ordinals) - 1):
                yield self._make(number)
                progress.advance(BLOCK)

    def placed(self, ordinal: int) -> tuple[int, int, int]:
        """Return (number in the file, begin and end in the stream) of a chosen document, by its place among these."""
        block = self._block(int(np.searchsorted(self._ordinals, ordinal, side="right")) - 1)
        at = ordinal - block.ordinal
        return int(block.numbers[at]), int(block.starts[at]), int(block.starts[at + 1])

    def parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (document number in the file, offset in it, tokens) of each document in [start, stop), in order."""
        found = []
        for ordinal in np.unique(self._spread(np.arange(start, stop))[0]).tolist():
            number, begin, end = self.placed(ordinal)
            found.append((number, max(start, begin) - begin, min(stop, end) - max(start, begin)))
        return found

    def _make(self, number: int) -> Block:
        numbers, first_tokens, ends = _chosen(self.dataset, self._side, number)
        starts = np.empty(len(numbers) + 1, np.int64)
        starts[0] = self._starts[number]
        starts[1:] = starts[0] + np.cumsum(ends - first_tokens)
        return Block(int(self._ordinals[number]), numbers, first_tokens, starts)

    def _spread(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ordinals of the documents, positions in the file) of ascending stream positions, int64 each."""
        ordinals, in_file = np.empty_like(positions), np.empty_like(positions)
        holding = np.searchsorted(self._starts, positions, side="right") - 1  # right: skips blocks without tokens
        for number in np.unique(holding).tolist():
            own, block = holding == number, self._block(number)
            at = np.searchsorted(block.starts, positions[own], side="right") - 1  # right: skips empty documents
            ordinals[own] = block.ordinal + at
            in_file[own] = positions[own] - block.starts[at] + block.first_tokens[at]
        return ordinals, in_file


def _chosen(dataset: TokenDataset, side: Side | None, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (numbers, first tokens, ends in the file) of the chosen documents of a block."""
    first = number * BLOCK
    stop = min(first + BLOCK, dataset.num_documents)
    numbers = np.arange(first, stop) if side is None else side.numbers(first, stop)
    offsets = dataset.offsets(first, stop + 1)
    return numbers, offsets[numbers - first], offsets[numbers - first + 1]


def _before_blocks(dataset: TokenDataset, side: Side | None) -> np.ndarray:
    """Return how many documents and tokens are chosen before each block, and in all: int64 [2, blocks + 1]."""
    total = dataset.num_documents
    bounds = np.minimum(np.arange(0, total + BLOCK, BLOCK), total)
    found = np.zeros((2, len(bounds)), np.int64)
    with doing(f"counting the documents of {dataset.prefix}", total) as progress:
        if side is None:
            return np.stack([bounds, [dataset.offsets(bound, bound + 1)[0] for bound in bounds.tolist()]])
        for number in range(len(bounds) - 1):
            numbers, first_tokens, ends = _chosen(dataset, side, number)
            found[:, number + 1] = len(numbers), (ends - first_tokens).sum()
            progress.advance(BLOCK)
    return found.cumsum(axis=1)


def _gathered(read: Callable[[int, int], np.ndarray], in_file: np.ndarray) -> np.ndarray:
    """Return the items at ascending positions of a file; `read` returns the items [start, stop) of it."""
    if not len(in_file):
        return read(0, 0)
    first, span = int(in_file[0]), int(in_file[-1] - in_file[0]) + 1
    if span <= _WORTH * len(in_file):  # one read that includes the gaps costs less than many
        return read(first, first + span)[in_file - first]
    breaks = np.flatnonzero(np.diff(in_file) != 1) + 1
    runs = ((int(run[0]), int(run[-1]) + 1) for run in np.split(in_file, breaks))
    return np.concatenate([read(*run) for run in runs])
