"""Read and check windows of a token stream, and join them into the input of a forward pass.

Window k of a stream is its tokens [k S, k S + S + 1); the first S are the input, the last S the targets. Every id is
checked against the vocabulary when it is read: an id past the end of the embedding table would otherwise cause an
unreadable device assert, or no error at all. The message names the file, the document and the position.

With `mask_eod` the documents of a window are kept apart: attention does not cross from one to another, positions
restart, and the last token of a document, whose target is the first token of an unrelated one, is not scored. With
`pack` a window holds whole documents (packing.py), then padding that is not scored. If token files have a mask
(loss_mask.py), only its tokens are scored, as targets.

Shapes: S sequence, B rows of a micro-batch; sequence first, as everywhere in the model.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from megazero.base.errors import UserError
from megazero.data.batch import MicroBatch
from megazero.data.documents import TokenStream, document_lengths, split_streams
from megazero.data.packing import SHORTEST, Packing
from megazero.data.token_dataset import TokenDataset


class WindowTokens(NamedTuple):
    """The tokens of a window, and the one after it: arrays [S + 1].

    Attributes:
        tokens: ids, int64.
        ordinals: the ordinal of each token's document in the stream, int64; -1: padding.
        scored: bool, which tokens count in the loss as targets.
    """

    tokens: np.ndarray
    ordinals: np.ndarray
    scored: np.ndarray


class WindowDataset:
    """The windows of a stream of tokens.

    Args:
        stream: the documents.
        seq_len: S, tokens of a sample.
        vocab: ids must be in [0, vocab).
        mask_eod: keep the documents of a window apart.
        pack: windows are whole documents; needs mask_eod.

    Attributes:
        num_windows: (num_tokens - 1) // S, or with `pack` as many as the documents need.
        packing: the documents of each window; None: windows follow each other in the stream.

    Raises:
        UserError: 207 if there is no window; 205, on reading, for an id outside the vocabulary.
    """

    def __init__(self, stream: TokenStream, seq_len: int, vocab: int, mask_eod: bool, pack: bool = False):
        assert mask_eod or not pack, "checked by the config"
        self.stream, self.seq_len, self.vocab, self.mask_eod = stream, seq_len, vocab, mask_eod
        self.packing = Packing(stream.lengths, seq_len) if pack else None
        self.num_windows = (stream.num_tokens - 1) // seq_len if self.packing is None else self.packing.num_windows
        if self.num_windows < 1:
            what, do = f"at least seq_len + 1 = {seq_len + 1:,} tokens", "use more text or a smaller model.seq_len"
            if pack:
                what, do = f"a document of at least {SHORTEST} tokens", "use more text"
            what = f"expected {what}, got {stream.num_tokens:,} in {stream.num_documents:,} documents"
            raise UserError(207, what, do, where=stream.dataset.bin_path)

    def spans(self, window: int) -> list[tuple[int, int]]:
        """Return the spans [start, stop) of stream tokens that make up the input of a window, in order."""
        if self.packing is None:
            return [(window * self.seq_len, (window + 1) * self.seq_len)]
        placed = map(self.stream.placed, self.packing.documents(window))
        return [(start, min(stop, start + self.seq_len)) for _, start, stop in placed]

    def read(self, window: int) -> WindowTokens:
        """Return the tokens of a window, checked."""
        if self.packing is None:
            start = window * self.seq_len
            return self._read(start, start + self.seq_len + 1)
        parts = [self._read(*span) for span in self.spans(window)]
        rest = self.seq_len + 1 - sum(len(part.tokens) for part in parts)
        padding = WindowTokens(np.zeros(rest, np.int64), np.full(rest, -1), np.zeros(rest, bool))
        return WindowTokens(*map(np.concatenate, zip(*parts, padding, strict=True)))

    def _read(self, start: int, stop: int) -> WindowTokens:
        """Return tokens [start, stop) of the stream, checked."""
        tokens, ordinals = self.stream.read(start, stop)
        outside = (tokens < 0) | (tokens >= self.vocab)
        if outside.any():
            first = int(np.argmax(outside))
            document, position = self.stream.locate(start + first)
            shard, document = self.stream.dataset.shard_of(document)
            what = f"token {position:,} of document {document:,} is {tokens[first]}, expected 0 <= id < {self.vocab}"
            do = "set model.vocab and data.tokenizer to those the data was made with"
            raise UserError(205, what, do, where=shard.bin_path)
        return WindowTokens(tokens, ordinals, self.stream.scored(start, stop))

    def micro_batch(self, windows: np.ndarray, sample_ids: np.ndarray) -> MicroBatch:
        """Return the windows [B] as one micro-batch that carries `sample_ids` [B]."""
        return micro_batch([self.read(int(window)) for window in windows], sample_ids, mask_eod=self.mask_eod)


def micro_batch(reads: Sequence[WindowTokens], sample_ids: np.ndarray, *, mask_eod: bool) -> MicroBatch:
    """Return B windows as one micro-batch that carries `sample_ids` [B].

    Args:
        reads: the result of `WindowDataset.read` for each window; all of equal length.
        mask_eod: keep the documents of a window apart.
    """
    tokens = np.stack([read.tokens for read in reads], axis=1)  # [S + 1, B]
    ordinals = np.stack([read.ordinals for read in reads], axis=1)
    valid = np.stack([read.scored for read in reads], axis=1)[1:]
    positions = documents = None
    if mask_eod:
        same = ordinals[1:] == ordinals[:-1]
        starts = np.zeros(same.shape, bool)  # the token begins a document; the window's first needs no mark
        starts[1:] = ~same[:-1]
        documents = tuple(document_lengths(of_row) for of_row in starts.T)
        index = np.arange(len(valid))[:, None]
        positions = torch.from_numpy(index - np.maximum.accumulate(np.where(starts, index, 0), axis=0))
        valid &= same
    return MicroBatch(
        tokens_SB=torch.from_numpy(tokens[:-1]),
        targets_SB=torch.from_numpy(tokens[1:].copy()),  # no memory shared with tokens_SB
        valid_SB=torch.from_numpy(valid),
        positions_SB=positions,
        documents=documents,
        sample_ids_B=torch.from_numpy(sample_ids.astype(np.int64)),
    )


def cut_windows(
    dataset: TokenDataset, share: float | None, seq_len: int, vocab: int, mask_eod: bool, pack: bool = False
) -> tuple[WindowDataset, WindowDataset | None]:
    """Return the windows of a data set's training documents, and those of its held-out documents.

    Args:
        share: the fraction of the documents that is held out; None: no document is.
        seq_len, vocab, mask_eod, pack: see WindowDataset.

    Raises:
        UserError: 206 a split with an empty side, 207 too few tokens.
    """
    cut = partial(WindowDataset, seq_len=seq_len, vocab=vocab, mask_eod=mask_eod, pack=pack)
    if share is None:
        return cut(TokenStream(dataset)), None
    trained, held_out = split_streams(dataset, share)
    return cut(trained), cut(held_out)
