"""Choose the documents of a run, and join them to one stream of tokens.

Training and validation are split by whole documents, so that no validation text was seen in training. Which side a
document is on depends on nothing but its number and the fraction: not on the seed, the sequence length or the number of
ranks, so two runs with different seeds are validated on the same text, and appending documents moves none.

A `TokenStream` joins the chosen documents, in file order, end to end. Nothing is copied: a read finds its documents by
binary search in their cumulative lengths (8 bytes a document) and reads its tokens from the file.
"""

from collections.abc import Callable

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.data.indexed_dataset import IndexedDataset

_WORD = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B9)  # mix(0) is 0: without an offset document 0 would always be for validation

_SAMPLED = 256  # tokens in a stream's digest
_WORTH = 64  # tokens that are read for one that is wanted, before each run of them is read for itself


def mix(x: np.ndarray) -> np.ndarray:
    """Return a 32-bit hash of 32-bit words held in uint64: two multiplications, three xor-shifts.

    The constants are the low-bias "lowbias32" of C. Wellons (hash-prospector). It is a bijection of the 32-bit words.
    """
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & _WORD
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & _WORD
    return x ^ (x >> np.uint64(16))


def split_documents(num_documents: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the document numbers of (training, validation), both int64 and rising.

    Document i is for validation when hash(i) / 2^32 < fraction.

    Raises:
        UserError: 206 when one side would be empty, or the fraction is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise UserError(206, f"expected a validation fraction between 0 and 1, got {fraction}", "set data.valid")
    words = np.arange(num_documents, dtype=np.uint64)
    hashes = mix(mix(words & _WORD ^ _GOLDEN) ^ (words >> np.uint64(32)))
    is_valid = hashes < np.uint64(round(fraction * 2**32))
    num_valid = int(is_valid.sum())
    if num_valid in (0, num_documents):
        what = f"a fraction of {fraction} puts {num_valid} of {num_documents} documents into validation"
        raise UserError(206, what, "both sides need one: change data.valid or name a validation data set there")
    return np.flatnonzero(~is_valid), np.flatnonzero(is_valid)


def document_lengths(starts: np.ndarray) -> tuple[int, ...]:
    """Return the lengths of the documents of a window: bool, True where one begins; the first token needs no mark."""
    bounds = np.flatnonzero(starts[1:]) + 1
    return tuple(np.diff(bounds, prepend=0, append=len(starts)).tolist())


class TokenStream:
    """The chosen documents of a data set, in file order, as one sequence of `num_tokens` tokens.

    Args:
        dataset: the data set that holds them.
        documents: int64 document numbers, strictly rising.
    """

    def __init__(self, dataset: IndexedDataset, documents: np.ndarray):
        assert len(documents) == 0 or (np.diff(documents) > 0).all(), "documents in file order, each once"
        self.dataset = dataset
        self._first_tokens = dataset.document_offsets[documents]  # in the file
        self._starts = np.zeros(len(documents) + 1, np.int64)  # in the stream
        np.cumsum(dataset.document_offsets[documents + 1] - self._first_tokens, out=self._starts[1:])
        self.num_documents = len(documents)
        self.num_tokens = int(self._starts[-1])

    def digest(self) -> str:
        """Return a digest of where its documents lie in the file, of some tokens, and of the mask if there is one."""
        some = np.linspace(0, self.num_tokens - 1, min(_SAMPLED, self.num_tokens)).astype(np.int64)
        tokens = self._tokens(self._in_file(some, self._ordinals(some)))
        digest = xxhash.xxh3_64(self._first_tokens.tobytes())
        for part in (self._starts, tokens.astype(np.int64)):
            digest.update(part.tobytes())
        if self.dataset.mask is not None:
            digest.update(self.dataset.mask.digest.encode())
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [start, stop): (ids int64 [stop - start], ordinal of each one's document, int64).

        The ordinal counts the chosen documents from 0; a change of ordinal is a document boundary.
        """
        assert 0 <= start <= stop <= self.num_tokens
        positions = np.arange(start, stop)
        ordinals = self._ordinals(positions)
        return self._tokens(self._in_file(positions, ordinals)).astype(np.int64), ordinals

    def scored(self, start: int, ordinals: np.ndarray) -> np.ndarray | None:
        """Return which tokens from `start` on are trained on, bool; None: the data set has no mask, and all are.

        Args:
            ordinals: of each one's document, as `read` gives them.
        """
        if (mask := self.dataset.mask) is None:
            return None
        return _gathered(mask.read, self._in_file(np.arange(start, start + len(ordinals)), ordinals), np.dtype(bool))

    def locate(self, position: int) -> tuple[int, int]:
        """Return (document number in the file, position in the document) of a token of the stream, for messages."""
        positions = np.array([position])
        return self.dataset.locate(int(self._in_file(positions, self._ordinals(positions))[0]))

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each document, int64 [num_documents]."""
        return np.diff(self._starts)

    def document(self, ordinal: int, most: int | None = None) -> np.ndarray:
        """Return the tokens of a document by its place among those chosen; the first `most` of them, None: all."""
        first, length = int(self._first_tokens[ordinal]), int(self._starts[ordinal + 1] - self._starts[ordinal])
        return self.dataset.read(first, first + (length if most is None else min(length, most)))

    def bounds(self, ordinal: int) -> tuple[int, int]:
        """Return where a document begins and ends in the stream, by its place among those chosen."""
        return int(self._starts[ordinal]), int(self._starts[ordinal + 1])

    def ordinal(self, position: int) -> int:
        """Return the place among those chosen of the document that has a token of the stream."""
        return int(self._ordinals(np.array([position]))[0])

    def number(self, ordinal: int) -> int:
        """Return the number in the file of a document, which has tokens, by its place among those chosen."""
        return self.dataset.locate(int(self._first_tokens[ordinal]))[0]

    def parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (document number in the file, offset in it, tokens) of each document in [start, stop), in order."""
        found = []
        first, last = self.ordinal(start), int(np.searchsorted(self._starts, stop))
        for ordinal in range(first, last):
            begin, end = max(start, int(self._starts[ordinal])), min(stop, int(self._starts[ordinal + 1]))
            if begin < end:
                found.append((*self.locate(begin), end - begin))
        return found

    def span(self, document: int) -> tuple[int, int] | None:
        """Return where a document of the file begins and ends in the stream; None: it is not among those chosen."""
        begin, end = self.dataset.document_offsets[document : document + 2].tolist()
        ordinal = int(np.searchsorted(self._first_tokens, begin, side="right")) - 1
        if begin == end or ordinal < 0 or self._first_tokens[ordinal] != begin:
            return None
        return self.bounds(ordinal)

    def _tokens(self, in_file: np.ndarray) -> np.ndarray:
        """Return the tokens at rising positions of the file."""
        return _gathered(self.dataset.read, in_file, self.dataset.dtype)

    def _ordinals(self, positions: np.ndarray) -> np.ndarray:
        """Return of tokens of the stream the places among those chosen of their documents."""
        return np.searchsorted(self._starts, positions, side="right") - 1  # right: skips empty documents

    def _in_file(self, positions: np.ndarray, ordinals: np.ndarray) -> np.ndarray:
        return positions - self._starts[ordinals] + self._first_tokens[ordinals]


def _gathered(read: Callable[[int, int], np.ndarray], in_file: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return what `read`, which gives [start, stop) of a file, has at rising positions of it."""
    if not len(in_file):
        return np.empty(0, dtype)
    first, span = int(in_file[0]), int(in_file[-1] - in_file[0]) + 1
    if span <= _WORTH * len(in_file):  # one read with what lies between costs less than many
        return read(first, first + span)[in_file - first]
    breaks = np.flatnonzero(np.diff(in_file) != 1) + 1
    runs = ((int(run[0]), int(run[-1]) + 1) for run in np.split(in_file, breaks))
    return np.concatenate([read(*run) for run in runs])
