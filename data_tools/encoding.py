"""Text to ids in worker processes, results in the order of the text.

SentencePiece encodes some 3 MB/s per core, so this is where the time of preprocessing goes. Pieces of text are handed
out in batches of about a quarter of a megabyte; at most a few batches per worker are on their way at any time, so
memory does not grow with the corpus, and they are taken back in the order in which they went out, so the output is the
same, byte for byte, whatever the number of workers.

Workers are spawned, not forked: they inherit no threads and no locks. They leave Ctrl-C to the parent, and end when it
does, however it ends.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_tools.corpus import PIECE_BYTES, Piece
from megazero.base.errors import UserError
from megazero.data.tokenizer import Tokenizer

_BATCHES_PER_WORKER = 3  # on their way: one at work, one waiting, one done and waiting for its turn


def encode_pieces(
    pieces: Iterable[Piece], tokenizer: Path, dtype: np.dtype, workers: int
) -> Generator[tuple[Piece, np.ndarray], None, None]:
    """Every piece with its ids [n] of `dtype`, in order. Close the generator to end the workers.

    Raises:
        UserError: 216 when a worker process died; whatever reading the pieces raises.
    """
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
    under_way: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()

    def oldest() -> Iterator[tuple[Piece, np.ndarray]]:
        batch, future = under_way.popleft()
        return zip(batch, future.result(), strict=True)

    try:
        _start_workers(pool, workers)
        for batch in _batches(pieces):
            future = pool.submit(_encode, [piece.text for piece in batch], tokenizer, dtype)
            under_way.append((batch, future))
            if len(under_way) > _BATCHES_PER_WORKER * workers:
                yield from oldest()
        while under_way:
            yield from oldest()
    except BrokenProcessPool as error:
        raise UserError(216, "a worker process died (killed, or out of memory)", "try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces with some PIECE_BYTES of text, so that short documents do not cost a message each."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 64  # as if no piece were empty: bounds the number of pieces, too
        if characters >= PIECE_BYTES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _start_workers(pool: ProcessPoolExecutor, workers: int) -> None:
    """One idle task each, sent while Ctrl-C is blocked: new processes inherit that, and it reaches us afterwards.

    Without it an interrupt during their first half second prints one traceback per worker.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(workers):
            pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for tasks on a pipe that it holds open itself, so it would outlive a killed parent for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in worker processes only"
    parent.join()
    os._exit(1)


@lru_cache(maxsize=1)
def _open_tokenizer(path: Path) -> Tokenizer:
    """Once per worker process."""
    return Tokenizer(path)


def _encode(texts: list[str], tokenizer: Path, dtype: np.dtype) -> list[np.ndarray]:
    encode = _open_tokenizer(tokenizer).encode
    return [np.array(encode(text), dtype) for text in texts]
