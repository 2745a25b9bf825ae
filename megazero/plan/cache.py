"""Compute the bytes of the keys and values that generation keeps on one tensor rank.

A layer keeps a key and a value of d channels for each of its rank's key-value heads and each column of the batch:
2 b (G / t) d bytes a column for a text, with b bytes an element. A layer with a window w has room for 2 w columns and
those of one pass; a layer without one for all columns (`model/cache.py`).
"""

from megazero.plan.model import Shape

CHUNK = 512  # the most columns of one pass


def cache_bytes(shape: Shape, tensor: int, texts: int, length: int, item: int) -> int:
    """Return the bytes of a batch of texts.

    Args:
        tensor: number of tensor ranks.
        length: columns of the batch: the longest prompt and the new tokens.
        item: bytes of an element.
    """
    chunk = min(CHUNK, length)
    windows = (shape.window_of(shape.kind(i)) for i in range(shape.layers))
    columns = sum(length if window is None else min(length, 2 * window + chunk) for window in windows)
    return 2 * item * texts * max(1, shape.kv_heads // tensor) * shape.head_dim * columns
