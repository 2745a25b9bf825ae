"""Windows of a token stream: read, checked, and put together as the input of a forward pass.

Window k of a stream is its tokens [k S, k S + S + 1); the first S are the input, the last S the targets. Every id is
checked against the vocabulary when it is read: an id past the end of the embedding table is otherwise an unreadable
device assert, or silence. The message names the file, the document and the position.

With `mask_eod` a window that holds several documents keeps them apart: each token knows its document (attention must
not cross), positions restart, and the last token of a document, whose target is the first token of an unrelated one, is
not scored.

Shapes: S sequence, B rows of a micro-batch; sequence first, as everywhere in the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megazero.base.errors import UserError
from megazero.data.documents import TokenStream, document_lengths, split_documents
from megazero.data.indexed_dataset import IndexedDataset


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass.

    Attributes:
        tokens_SB, targets_SB: int64; the target is the next token.
        valid_SB: bool, which targets count in the loss.
        positions_SB: int64, from the start of the token's document or of the window; None: 0 ... S - 1.
        documents: the lengths of the documents of each row, in order; None: each row is one.
        sample_ids_B: int64, numbers of the samples over the whole run (validation: of the windows).
    """

    tokens_SB: torch.Tensor
    targets_SB: torch.Tensor
    valid_SB: torch.Tensor
    positions_SB: torch.Tensor | None
    documents: tuple[tuple[int, ...], ...] | None
    sample_ids_B: torch.Tensor


class WindowDataset:
    """The windows of a stream of tokens.

    Args:
        stream: the documents.
        seq_len: S, tokens of a sample.
        vocab: ids must lie in [0, vocab).
        mask_eod: keep the documents of a window apart.

    Attributes:
        num_windows: (num_tokens - 1) // S.

    Raises:
        UserError: 207 when there is not one window; 205, on reading, for an id outside the vocabulary.
    """

    def __init__(self, stream: TokenStream, seq_len: int, vocab: int, mask_eod: bool):
        self.stream, self.seq_len, self.vocab, self.mask_eod = stream, seq_len, vocab, mask_eod
        self.num_windows = (stream.num_tokens - 1) // seq_len
        if self.num_windows < 1:
            what = f"expected at least seq_len + 1 = {seq_len + 1:,} tokens, got {stream.num_tokens:,}"
            what += f" in {stream.num_documents:,} documents"
            raise UserError(207, what, "use more text or a smaller model.seq_len", where=stream.dataset.bin_path)

    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int64 [S + 1], ordinal of each one's document in the stream int64 [S + 1]), checked."""
        start = window * self.seq_len
        tokens, ordinals = self.stream.read(start, start + self.seq_len + 1)
        outside = (tokens < 0) | (tokens >= self.vocab)
        if outside.any():
            first = int(np.argmax(outside))
            document, position = self.stream.locate(start + first)
            what = f"token {position:,} of document {document:,} is {tokens[first]}, expected 0 <= id < {self.vocab}"
            do = "set model.vocab and data.tokenizer to what the data was made with"
            raise UserError(205, what, do, where=self.stream.dataset.bin_path)
        return tokens, ordinals

    def micro_batch(self, windows: np.ndarray, sample_ids: np.ndarray) -> MicroBatch:
        """Return the windows [B] as one micro-batch that carries `sample_ids` [B]."""
        return micro_batch([self.read(int(window)) for window in windows], sample_ids, mask_eod=self.mask_eod)


def micro_batch(
    reads: Sequence[tuple[np.ndarray, np.ndarray]], sample_ids: np.ndarray, *, mask_eod: bool
) -> MicroBatch:
    """Return what was read of windows [B] as one micro-batch that carries `sample_ids` [B].

    Args:
        reads: of each window what `WindowDataset.read` returns; all as long.
        mask_eod: keep the documents of a window apart.
    """
    tokens = np.stack([tokens for tokens, _ in reads], axis=1)  # [S + 1, B]
    ordinals = np.stack([ordinals for _, ordinals in reads], axis=1)
    valid, positions, documents = np.ones(tokens[1:].shape, bool), None, None
    if mask_eod:
        valid = ordinals[1:] == ordinals[:-1]
        starts = np.zeros(valid.shape, bool)  # the token begins a document; the window's first needs no mark
        starts[1:] = ~valid[:-1]
        documents = tuple(document_lengths(of_row) for of_row in starts.T)
        index = np.arange(len(valid))[:, None]
        positions = torch.from_numpy(index - np.maximum.accumulate(np.where(starts, index, 0), axis=0))
    return MicroBatch(
        tokens_SB=torch.from_numpy(tokens[:-1]),
        targets_SB=torch.from_numpy(tokens[1:].copy()),  # no memory shared with tokens_SB
        valid_SB=torch.from_numpy(valid),
        positions_SB=positions,
        documents=documents,
        sample_ids_B=torch.from_numpy(sample_ids.astype(np.int64)),
    )


def open_datasets(
    train: str | Path, valid: str | Path | float | None, seq_len: int, vocab: int, mask_eod: bool
) -> tuple[WindowDataset, WindowDataset | None]:
    """Open the training windows and, if any, the validation windows of a run.

    Args:
        train: prefix of the training data set.
        valid: prefix of another one, or the fraction of the training documents to hold out, or None.
        seq_len, vocab, mask_eod: see WindowDataset.

    Raises:
        UserError: 201 to 204 files missing or damaged, 206 a split with an empty side, 207 too few tokens.
    """

    def windows(dataset: IndexedDataset, documents: np.ndarray) -> WindowDataset:
        return WindowDataset(TokenStream(dataset, documents), seq_len, vocab, mask_eod)

    dataset = IndexedDataset(train)
    everything = np.arange(dataset.num_documents)
    if valid is None:
        return windows(dataset, everything), None
    if isinstance(valid, int | float):
        train_documents, valid_documents = split_documents(dataset.num_documents, valid)
        return windows(dataset, train_documents), windows(dataset, valid_documents)
    other = IndexedDataset(valid)
    return windows(dataset, everything), windows(other, np.arange(other.num_documents))
