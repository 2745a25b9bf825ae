"""Encode text into ids in worker processes, results in the order of the text.

SentencePiece encodes some 3 MB/s per core, so this is where the time of preprocessing goes. Pieces of text are handed
out in batches of about a quarter of a megabyte to the workers in turn; each has one batch at a time, so memory does not
grow with the corpus, and results are taken back in the order in which they went out, so the output is the same, byte
for byte, whatever the number of workers.

Each worker has a pipe of its own, which ends when it is killed, in the middle of a message, too. (Through one queue for
all, the others wait for the queue's lock then, and we for the rest of the message, for ever: Python's process pool
hangs so.) Workers end when this process does, however it ends: then their pipe does. They are in a session of their
own, so that Ctrl-C reaches this process alone.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # a worker: from the repository, not from this folder, whose inspect.py hides Python's
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
    """Workers that encode; a context manager, which ends them.

    One worker is this process: what goes through a pipe, and the start of a process, would cost more than they give.

    Args:
        tokenizer: its file.
        dtype: of the ids.
        workers: how many.
    """

    def __init__(self, tokenizer: Path, dtype: np.dtype, workers: int):
        self._tokenizer, self._dtype, self._workers = tokenizer, dtype, workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

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
            yield from ((piece, _ids(tokenizer, piece, self._dtype)) for piece in pieces)
            return
        while len(self._processes) < self._workers:
            self._start_worker()
        under_way = deque[tuple[list[Piece], Connection]]()
        try:
            for number, batch in enumerate(_batches(pieces)):
                done = [*_encoded(*under_way.popleft())] if len(under_way) == self._workers else []
                connection = self._connections[number % self._workers]  # of what is done now
                connection.send(batch)
                under_way.append((batch, connection))
                yield from done
            for each in under_way:
                yield from _encoded(*each)
        except (EOFError, OSError) as error:  # OSError without a number: the pipe ended within a message
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
        theirs.close()  # ours ends when the worker does


def _encoded(batch: list[Piece], connection: Connection) -> Iterator[tuple[Piece, np.ndarray]]:
    """Return the pieces of a batch with the ids that a worker has made of them. Raises what it could not do."""
    found = connection.recv()
    if isinstance(found, dict):
        raise UserError(**found)
    return zip(batch, found, strict=True)


def _ids(tokenizer: Tokenizer, piece: Piece, dtype: np.dtype) -> np.ndarray:
    return np.array(tokenizer.encode(piece.text) if piece.id is None else [piece.id], dtype)


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


def _work(connection: Connection, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Encode what comes until the other end of the pipe is closed."""
    try:
        while True:
            batch = connection.recv()
            try:
                connection.send([_ids(tokenizer, piece, dtype) for piece in batch])
            except UserError as error:  # itself it cannot be pickled
                connection.send({"code": error.code, "what": error.what, "do": error.do, "where": error.where})
    except (EOFError, ConnectionError, MemoryError):
        return


if __name__ == "__main__":
    _, path, kind, descriptor = sys.argv
    _work(Connection(int(descriptor)), open_tokenizer(path), np.dtype(kind))
