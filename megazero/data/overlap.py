"""Find documents that are both trained on and validated on, by the hashes of their tokens.

A document's hash is compared with those of documents that are as long. Of a training document the first tokens are
read, and all of them only where those agree; so what is read is bounded, by the number of documents looked at.
"""

from typing import NamedTuple

import numpy as np
import xxhash

from megazero.data.documents import TokenStream

SHORTEST = 32  # tokens: a heading or an empty file is the same in many places, and says nothing of a copy
MOST = 100_000  # documents of either side that are looked at; of more, so many at equal distances
_FIRST = 64  # tokens that are compared first


class Shared(NamedTuple):
    """A document that both have: its number in the files of the training data, and of the validation set."""

    training: int
    validation: int


def shared_document(training: TokenStream, validation: TokenStream) -> Shared | None:
    """Return a document of at least SHORTEST tokens that both streams have; None: none was found."""
    lengths = validation.lengths
    chosen = _some(np.flatnonzero(lengths >= SHORTEST))
    known: dict[str, list[int]] = {}
    for ordinal in chosen.tolist():
        known.setdefault(_hash(validation, ordinal, _FIRST), []).append(ordinal)
    alike = np.isin(training.lengths, np.unique(lengths[chosen]))
    for ordinal in _some(np.flatnonzero(alike)).tolist():
        for other in known.get(_hash(training, ordinal, _FIRST), ()):
            if _hash(training, ordinal, None) == _hash(validation, other, None):
                return Shared(training.number(ordinal), validation.number(other))
    return None


def _some(ordinals: np.ndarray) -> np.ndarray:
    return ordinals[np.linspace(0, len(ordinals) - 1, MOST).astype(np.int64)] if len(ordinals) > MOST else ordinals


def _hash(stream: TokenStream, ordinal: int, most: int | None) -> str:
    """Return a hash of a document's length and its first tokens; None: of all of them."""
    tokens = stream.document(ordinal, most).astype(np.int64)
    return f"{int(stream.lengths[ordinal])} {xxhash.xxh3_128_hexdigest(tokens.tobytes())}"
