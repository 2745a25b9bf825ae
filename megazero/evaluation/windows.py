"""Cut a text into windows that score each of its tokens once, with as much context as the stride leaves.

text      d 0 1 2 3 4 5 6 7 8 9        d: an end-of-document token, so that the first token is scored too
windows   [d 0 1 2 3 4 5]              of 6 tokens, stride 2: a token has at least 4 before it, after the first window
              [1 2 3 4 5 6 7]          scores 6 and 7
                  [3 4 5 6 7 8 9]      scores 8 and 9
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megazero.base.errors import UserError
from megazero.data.batch import MicroBatch
from megazero.data.tokenizer import Tokenizer

Window = tuple[Sequence[int], int]  # ids, and the number of its last ids that are scored
Text = tuple[list[int], int]  # its ids, and its bytes


def read_text(path: Path, tokenizer: Tokenizer) -> Text:
    """Return a text of a file. Raises UserError 229: it cannot be read, or is empty."""
    do = "give a file of UTF-8 text"
    try:
        content = path.read_bytes()
        ids = tokenizer.encode(content.decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start:,} is not UTF-8"
        raise UserError(229, f"cannot be read: {why}", do, where=path) from None
    if not ids:
        raise UserError(229, "is empty", do, where=path)
    return ids, len(content)


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

    The id of a sample is the number of its window; beyond the last window, samples are padding.

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
        numbers_B = torch.arange(start, start + rows) * ranks + rank
        yield MicroBatch(tokens_SB, targets_SB, valid_SB, None, None, numbers_B)
