"""Cut a text into windows that score each of its tokens once, with as much context as the stride leaves.

text      d 0 1 2 3 4 5 6 7 8 9        d: an end-of-document token, so that the first token is scored too
windows   [d 0 1 2 3 4 5]              of 6 tokens, stride 2: a token has at least 4 before it, after the first window
              [1 2 3 4 5 6 7]          scores 6 and 7
                  [3 4 5 6 7 8 9]      scores 8 and 9
"""

from collections.abc import Iterator, Sequence

import torch

from megazero.data.batch import MicroBatch

Window = tuple[Sequence[int], int]  # ids, and the number of its last ids that are scored


def windows_of(ids: Sequence[int], first: int, length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a text: at most length + 1 ids each, the last of which is only a target.

    Args:
        first: the id before the text.
        length: the most inputs of a window.
        stride: how many new targets a window scores, after the first one.
    """
    text, scored = [first, *ids], 0
    while scored < len(ids):
        stop = min(scored + (stride if scored else length), len(ids))
        yield text[max(0, stop - length) : stop + 1], stop - scored
        scored = stop


def batches_of(windows: Sequence[Window], length: int, rows: int, rank: int, ranks: int) -> Iterator[MicroBatch]:
    """Yield a data rank's batches of `rows` windows; all ranks get equally many, the last ones without scored tokens.

    Args:
        length: of the sequences, shorter windows are padded to it.
        rank, ranks: of the data axis.
    """
    each = -(-len(windows) // (rows * ranks)) * rows
    own = [windows[i * ranks + rank] if i * ranks + rank < len(windows) else ([0, 0], 0) for i in range(each)]
    for start in range(0, each, rows):
        some = own[start : start + rows]
        tokens_SB, targets_SB = torch.zeros(2, length, rows, dtype=torch.int64)
        valid_SB = torch.zeros(length, rows, dtype=torch.bool)
        for row, (ids, scored) in enumerate(some):
            inputs = len(ids) - 1
            tokens_SB[:inputs, row], targets_SB[:inputs, row] = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
            valid_SB[inputs - scored : inputs, row] = True
        yield MicroBatch(tokens_SB, targets_SB, valid_SB, None, None, torch.zeros(rows, dtype=torch.int64))
