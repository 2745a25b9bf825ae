"""Read batches: windows of the token stream as tensors.

Window k of a stream is its tokens [k S, k S + S + 1); the first S are the input, the last S the targets. A step asks
for the sample ids of its rank (sampler), each id names a window, each window is one read of the file. All of it is a
pure function of the step, so there is nothing to save and nothing to restore; the only state is one background thread
that reads step s + 1 while step s computes.

Every id is checked against the vocabulary when it is read: an id past the end of the embedding table is otherwise an
unreadable device assert, or silence. The message names the file, the document and the position.

With `mask_eod` a window that holds several documents keeps them apart: each token knows its document (attention must
not cross), positions restart, and the last token of a document, whose target is the first token of an unrelated one, is
not scored.

Shapes: S sequence, B rows of a micro-batch; sequence first, as everywhere in the model.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megazero.base.errors import UserError
from megazero.data.documents import TokenStream, document_lengths, split_documents
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sampler import index_of, sample_id, window_of


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
        reads = [self.read(int(window)) for window in windows]
        tokens = np.stack([tokens for tokens, _ in reads], axis=1)  # [S + 1, B]
        ordinals = np.stack([ordinals for _, ordinals in reads], axis=1)
        valid, positions, documents = np.ones(tokens[1:].shape, bool), None, None
        if self.mask_eod:
            valid = ordinals[1:] == ordinals[:-1]
            starts = np.zeros(valid.shape, bool)  # the token begins a document; the window's first needs no mark
            starts[1:] = ~valid[:-1]
            documents = tuple(document_lengths(of_row) for of_row in starts.T)
            index = np.arange(self.seq_len)[:, None]
            positions = torch.from_numpy(index - np.maximum.accumulate(np.where(starts, index, 0), axis=0))
        return MicroBatch(
            tokens_SB=torch.from_numpy(tokens[:-1]),
            targets_SB=torch.from_numpy(tokens[1:].copy()),  # no memory shared with tokens_SB
            valid_SB=torch.from_numpy(valid),
            positions_SB=positions,
            documents=documents,
            sample_ids_B=torch.from_numpy(sample_ids.astype(np.int64)),
        )


class BatchLoader:
    """The micro-batches of one data rank, step by step.

    Args:
        dataset: windows to draw from.
        seed: of the order of windows.
        global_batch: sequences per step over all ranks; a multiple of micro_batch x num_data.
        micro_batch: sequences per micro-batch.
        data_rank, num_data: this rank on the data axis, and its size.
        pack: called with a step's micro-batches in the background thread; returns what `step` calls to get those of the
            device. None: they are used where they are made.
        stop: ends a `pack` that waits for a device, which may hang; called when the loader is closed.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        data_rank: int = 0,
        num_data: int = 1,
        pack: Callable[[Sequence[MicroBatch]], Callable[[], list[MicroBatch]]] | None = None,
        stop: Callable[[], object] = lambda: None,
    ):
        assert 0 <= data_rank < num_data and global_batch % (micro_batch * num_data) == 0, "held by the config"
        self._dataset, self._seed, self._global_batch, self._micro_batch = dataset, seed, global_batch, micro_batch
        self._indices = np.array(  # [micro-batches, rows]: which sequences of a step are this rank's
            [
                [index_of(data_rank, m, row, num_data, micro_batch) for row in range(micro_batch)]
                for m in range(global_batch // (micro_batch * num_data))
            ]
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._pack, self._stop = pack, stop
        self._ahead: tuple[int, Future[Callable[[], list[MicroBatch]]]] | None = None

    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, in order, a function of the step alone. Raises UserError 205: bad ids."""
        ahead, self._ahead = self._ahead, None
        ready = ahead[1] if ahead is not None and ahead[0] == step else self._thread.submit(self._build, step)
        batches = ready.result()()
        self._ahead = (step + 1, self._thread.submit(self._build, step + 1))
        return batches

    def samples(self, steps: int) -> int:
        """Return how many samples that many steps consume: the id of the next one."""
        return sample_id(steps, 0, self._global_batch)

    def epoch(self, steps: int) -> float:
        """Return how often that many steps go through the data set."""
        return self.samples(steps) / self._dataset.num_windows

    def close(self) -> None:
        """End the background thread, and drop what it read, or failed to read, for a step that never came."""
        self._stop()
        self._thread.shutdown(cancel_futures=True)

    def _build(self, step: int) -> Callable[[], list[MicroBatch]]:
        """Read a step; return what gives its micro-batches to the caller of `step`."""
        ids = sample_id(step, self._indices, self._global_batch)
        windows = window_of(ids, self._dataset.num_windows, self._seed)
        batches = [self._dataset.micro_batch(*rows) for rows in zip(windows, ids, strict=True)]
        return (lambda: batches) if self._pack is None else self._pack(batches)


def validation_batches(
    dataset: WindowDataset, micro_batch: int, limit: int | None = None, *, data_rank: int = 0, num_data: int = 1
) -> Iterator[MicroBatch]:
    """Yield every window once, in order, as micro-batches dealt to the ranks in turn; the last may have fewer rows.

    Every rank gets the same number: one without a last micro-batch gets one of which no target counts.

    Args:
        dataset: windows to read.
        micro_batch: rows of a micro-batch.
        limit: at most this many windows; None: all.
        data_rank, num_data: this rank on the data axis, and its size.
    """
    num_windows = dataset.num_windows if limit is None else min(limit, dataset.num_windows)
    for first in range(0, num_windows, micro_batch * num_data):
        start = first + data_rank * micro_batch
        windows = np.arange(start, min(start + micro_batch, num_windows))
        if len(windows):
            yield dataset.micro_batch(windows, windows)
        else:
            batch = dataset.micro_batch(np.zeros(1, np.int64), np.zeros(1, np.int64))
            yield replace(batch, valid_SB=torch.zeros_like(batch.valid_SB))


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
