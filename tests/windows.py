"""The windows of token files by their path, for tests that have no config."""

from pathlib import Path

from megazero.data.joined import open_files
from megazero.data.windows import WindowDataset, cut_windows


def open_datasets(
    train: str | Path, share: float | None, seq_len: int, vocab: int, mask_eod: bool, pack: bool = False
) -> tuple[WindowDataset, WindowDataset | None]:
    """The training windows and, of a share that is held out, the validation windows."""
    return cut_windows(open_files(train), share, seq_len, vocab, mask_eod, pack)
