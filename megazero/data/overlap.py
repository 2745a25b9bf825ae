"""Find documents that are both trained on and validated on, by the hashes of their tokens.

Only documents of equal length are compared. The first tokens of a training document are read, and the whole document
only if they agree. So the amount of reading is bounded by the number of documents examined.
"""

from collections.abc import Callable

import numpy as np
import xxhash

from megazero.data.documents import TokenStream

SHORTEST = 32  # tokens: a shorter text, such as a heading, occurs in many places without being a copy
MOST = 100_000  # documents examined on either side; of more documents, this many at equal distances
_FIRST = 64  # tokens that are compared first


def shared_document(training: TokenStream, validation: TokenStream) -> tuple[int, int] | None:
    """Return (training number, validation number) of a document of at least SHORTEST tokens in both files, or None."""
    chosen = _some(validation, lambda lengths: lengths >= SHORTEST)
    known: dict[str, list[int]] = {}
    for ordinal in chosen:
        known.setdefault(_hash(validation, ordinal, _FIRST), []).append(ordinal)
    alike = np.unique([end - begin for _, begin, end in map(validation.placed, chosen)]).astype(np.int64)
    for ordinal in _some(training, lambda lengths: np.isin(lengths, alike)):
        for other in known.get(_hash(training, ordinal, _FIRST), ()):
            if _hash(training, ordinal, None) == _hash(validation, other, None):
                return training.placed(ordinal)[0], validation.placed(other)[0]
    return None


def _some(stream: TokenStream, fits: Callable[[np.ndarray], np.ndarray]) -> list[int]:
    """Return the ordinals of the documents with lengths that `fits`: all, or MOST evenly spaced. In bounded memory."""
    found = sum(int(fits(np.diff(block.starts)).sum()) for block in stream.blocks("counting documents"))
    wanted = np.linspace(0, found - 1, MOST).astype(np.int64) if found > MOST else np.arange(found)
    before, places = 0, list[int]()
    for block in stream.blocks("choosing documents"):
        fitting = np.flatnonzero(fits(np.diff(block.starts)))
        first, last = np.searchsorted(wanted, (before, before + len(fitting)))
        places += (block.ordinal + fitting[wanted[first:last] - before]).tolist()
        before += len(fitting)
    return places


def _hash(stream: TokenStream, ordinal: int, most: int | None) -> str:
    """Return a hash of a document's length and its first `most` tokens; None: all its tokens."""
    _, begin, end = stream.placed(ordinal)
    tokens, _ = stream.read(begin, end if most is None else min(end, begin + most))
    return f"{end - begin} {xxhash.xxh3_128_hexdigest(tokens.tobytes())}"
