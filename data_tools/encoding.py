"""Encode text into ids in worker processes, results in the order of the text.

SentencePiece encodes some 3 MB/s per core, so this is where the time of preprocessing goes. Pieces of text are handed
out in batches of about a quarter of a megabyte; at most a few batches per worker are on their way at any time, so
memory does not grow with the corpus, and they are taken back in the order in which they went out, so the output is the
same, byte for byte, whatever the number of workers.

Each worker talks through a pipe of its own with a thread of ours. (Through one queue for all, a worker that is killed
in the middle of a message leaves the others waiting for the queue's lock, and us for the rest of the message, for ever:
Python's process pool hangs so.) Workers end when this process does, however it ends: then their pipe does.
"""

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, starmap
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import numpy as np

from data_tools.corpus import PIECE_BYTES, Piece
from megazero.base.errors import UserError
from megazero.data.tokenizer import Tokenizer, open_tokenizer

_BATCHES_PER_WORKER = 3  # on their way: one at work, one waiting, one done and waiting for its turn


class Encoder:
    """Workers that encode; a context manager, which ends them.

    One worker is this process: what goes through a pipe, and the start of a process, would cost more than they give.

    Args:
        tokenizer: its file.
        dtype: of the ids.
        workers: how many.
    """

    def __init__(self, tokenizer: Path, dtype: np.dtype, workers: int):
        self._tokenizer, self._dtype, self._workers = tokenizer, dtype, workers
        self._processes: list[BaseProcess] = []
        self._connections: SimpleQueue[Connection] = SimpleQueue()
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(workers, "encoding", self._take_worker)

    def __enter__(self) -> "Encoder":
        return self

    def encode(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
        """Yield every piece with its ids [n] of the type, in order.

        Raises:
            UserError: 216, a worker process died; 209, the tokenizer's library fails over a text; whatever reading the
                pieces raises.
        """
        if self._workers == 1:
            tokenizer = open_tokenizer(self._tokenizer)
            yield from ((piece, _ids(tokenizer, _sent(piece), self._dtype)) for piece in pieces)
            return
        for _ in range(self._workers - len(self._processes)):
            process, connection = _start_worker(self._tokenizer, self._dtype)
            self._processes.append(process)
            self._connections.put(connection)
        under_way: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()
        for batch in _batches(pieces):
            under_way.append((batch, self._threads.submit(self._ask, [_sent(piece) for piece in batch])))
            if len(under_way) > _BATCHES_PER_WORKER * self._workers:
                yield from _encoded(*under_way.popleft())
        yield from chain.from_iterable(starmap(_encoded, under_way))

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.join()

    def _take_worker(self) -> None:
        self._of_thread.connection = self._connections.get()  # there are as many as threads

    def _ask(self, texts: list[str | int]) -> list[np.ndarray]:
        """Return what the worker of this thread makes of texts."""
        try:
            self._of_thread.connection.send(texts)
            found = self._of_thread.connection.recv()
        except (EOFError, OSError) as error:  # OSError without a number: the pipe ended within a message
            what = "a worker process died (killed, or out of memory)"
            raise UserError(216, what, "try fewer --workers") from error
        if isinstance(found, dict):
            raise UserError(**found)
        return found


def _encoded(batch: list[Piece], future: Future[list[np.ndarray]]) -> Iterator[tuple[Piece, np.ndarray]]:
    return zip(batch, future.result(), strict=True)


def _sent(piece: Piece) -> str | int:
    """Return what of a piece is to be encoded: its text, or the id that it has already."""
    return piece.text if piece.id is None else piece.id


def _ids(tokenizer: Tokenizer, text: str | int, dtype: np.dtype) -> np.ndarray:
    return np.array([text] if isinstance(text, int) else tokenizer.encode(text), dtype)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield runs of pieces with some PIECE_BYTES of text, so that short documents do not cost a message each."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 64  # as if no piece were empty: bounds the number of pieces, too
        if characters >= PIECE_BYTES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _start_worker(tokenizer: Path, dtype: np.dtype) -> tuple[BaseProcess, Connection]:
    """Start a worker, spawned, so that it inherits no threads and no locks; return it and our end of its pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, tokenizer, dtype), daemon=True)
    with ctrl_c_held():
        process.start()
    theirs.close()  # ours ends when the worker does
    return process, ours


@contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context; a process that is started inside inherits that it is blocked.

    Without it an interrupt during the first half second of a new process prints a traceback of its own. Blocking the
    signal in the main thread, which alone may call this, is not enough: the kernel gives it to another thread then, and
    Python raises KeyboardInterrupt in the main one. So it is recorded, too.
    """
    came: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        came.append(number)

    handler = signal.signal(signal.SIGINT, record)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _work(connection: Connection, path: Path, dtype: np.dtype) -> None:
    """Encode what comes until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # unblocked by multiprocessing in the first process that it starts
    tokenizer = open_tokenizer(path)
    try:
        while True:
            texts = connection.recv()
            try:
                connection.send([_ids(tokenizer, text, dtype) for text in texts])
            except UserError as error:  # itself it cannot be pickled
                connection.send({"code": error.code, "what": error.what, "do": error.do, "where": error.where})
    except (EOFError, ConnectionError, MemoryError):
        return
