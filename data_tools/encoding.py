"""Encode text into ids in worker processes; results keep the order of the text.

SentencePiece encodes about 3 MB/s per core, so encoding takes most of the time of preprocessing. Pieces of text are
sent to the workers in turn, in batches of about a quarter of a megabyte. Each worker has one batch at a time, so memory
does not grow with the corpus. Results are received in the order in which the batches were sent, so the output is the
same, byte for byte, for any number of workers.

Each worker has a pipe of its own, which closes when the worker is killed, even in the middle of a message. (With one
queue for all, the other workers would wait for ever for the queue's lock, and this process for the rest of the message:
Python's process pool hangs like this.) Workers end when this process ends in any way, as their pipe then closes. They
run in a session of their own, so that Ctrl-C reaches only this process.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # a worker: import from the repository; this folder's inspect.py would hide Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from data_tools.corpus import PIECE_BYTES
from data_tools.selection import Piece
from megazero.base.errors import UserError
from megazero.data.tokenizer import Tokenizer, open_tokenizer


class Encoder:
    """A pool of worker processes that encode text; a context manager that ends them.

    A single worker is this process: a second process and its pipe would cost more time than they save.

    Args:
        tokenizer: the tokenizer's file.
        dtype: the type of the ids.
        workers: the number of workers.
    """

    def __init__(self, tokenizer: Path, dtype: np.dtype, workers: int):
        self._tokenizer, self._dtype, self._workers = tokenizer, dtype, workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> "Encoder":
        return self

    def encode(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
        """Yield every piece with its ids [n] of type `dtype`, in order.

        Raises:
            UserError: 216, a worker process died; 209, the tokenizer's library fails on a text; any error of the
                iterator `pieces`.
        """
        if self._workers == 1:
            tokenizer = open_tokenizer(self._tokenizer)
            yield from ((piece, _ids(tokenizer, piece, self._dtype)) for piece in pieces)
            return
        while len(self._processes) < self._workers:
            self._start_worker()
        under_way = deque[tuple[list[Piece], Connection]]()
        try:
            for number, batch in enumerate(_batches(pieces)):
                done = [*_encoded(*under_way.popleft())] if len(under_way) == self._workers else []
                connection = self._connections[number % self._workers]  # whose batch is done
                connection.send(batch)
                under_way.append((batch, connection))
                yield from done
            for each in under_way:
                yield from _encoded(*each)
        except (EOFError, OSError) as error:  # OSError without errno: the pipe closed within a message
            raise UserError(216, "a worker process died (killed, or out of memory)", "try fewer --workers") from error

    def __exit__(self, *_: object) -> None:
        for process, connection in zip(self._processes, self._connections, strict=False):
            process.kill()
            process.wait()
            connection.close()

    def _start_worker(self) -> None:
        ours, theirs = Pipe()
        line = [sys.executable, __file__, str(self._tokenizer), self._dtype.str, str(theirs.fileno())]
        self._connections.append(ours)
        self._processes.append(subprocess.Popen(line, pass_fds=[theirs.fileno()], start_new_session=True))
        theirs.close()  # so that ours closes when the worker ends


def _encoded(batch: list[Piece], connection: Connection) -> Iterator[tuple[Piece, np.ndarray]]:
    """Receive the ids of a batch from its worker; return (piece, ids) pairs. Raises the worker's UserError."""
    found = connection.recv()
    if isinstance(found, dict):
        raise UserError(**found)
    return zip(batch, found, strict=True)


def _ids(tokenizer: Tokenizer, piece: Piece, dtype: np.dtype) -> np.ndarray:
    return np.array(tokenizer.encode(piece.text) if piece.id is None else [piece.id], dtype)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of pieces with about PIECE_BYTES of text, so that short documents do not cost a message each."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 64  # so that the number of empty pieces is bounded, too
        if characters >= PIECE_BYTES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _work(connection: Connection, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Encode each batch that arrives, until the other end of the pipe is closed."""
    try:
        while True:
            batch = connection.recv()
            try:
                connection.send([_ids(tokenizer, piece, dtype) for piece in batch])
            except UserError as error:  # the error itself cannot be pickled
                connection.send({"code": error.code, "what": error.what, "do": error.do, "where": error.where})
    except (EOFError, ConnectionError, MemoryError):
        return


if __name__ == "__main__":
    _, path, kind, descriptor = sys.argv
    _work(Connection(int(descriptor)), open_tokenizer(path), np.dtype(kind))
