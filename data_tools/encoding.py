"""Encode text into ids in worker processes, results in the order of the text.

SentencePiece encodes some 3 MB/s per core, so this is where the time of preprocessing goes. Pieces of text are handed
out in batches of about a quarter of a megabyte; at most a few batches per worker are on their way at any time, so
memory does not grow with the corpus, and they are taken back in the order in which they went out, so the output is the
same, byte for byte, whatever the number of workers.

Workers are spawned, not forked: they inherit no threads and no locks. Each talks through a pipe of its own with a
thread of ours. (Through one queue for all, a worker that is killed in the middle of a message leaves the others waiting
for the queue's lock, and us for the rest of the message, for ever: Python's process pool hangs so.) They leave Ctrl-C
to the parent, and end when it does, however it ends: then their pipe does.
"""

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from data_tools.corpus import PIECE_BYTES, Piece
from data_tools.ctrl_c import ctrl_c_held
from megazero.base.errors import UserError
from megazero.data.tokenizer import open_tokenizer

_BATCHES_PER_WORKER = 3  # on their way: one at work, one waiting, one done and waiting for its turn


def encode_pieces(
    pieces: Iterable[Piece], tokenizer: Path, dtype: np.dtype, workers: int
) -> Generator[tuple[Piece, np.ndarray], None, None]:
    """Yield every piece with its ids [n] of `dtype`, in order. Close the generator to end the workers.

    One worker is this process: what goes through a pipe, and the start of a process, would cost more than they give.

    Raises:
        UserError: 216, a worker process died; 209, the tokenizer's library fails over a text; whatever reading the
            pieces raises.
    """
    if workers == 1:
        encode_here = open_tokenizer(tokenizer).encode
        for piece in pieces:
            yield piece, _ids(encode_here, _sent(piece), dtype)
        return
    under_way: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()
    processes: list[BaseProcess] = []
    connections: SimpleQueue[Connection] = SimpleQueue()
    of_thread = threading.local()

    def take_worker() -> None:
        of_thread.connection = connections.get()  # there are as many as threads

    def encode(texts: list[str | int]) -> list[np.ndarray]:
        try:
            of_thread.connection.send(texts)
            found = of_thread.connection.recv()
        except (EOFError, OSError) as error:  # OSError without a number: the pipe ended within a message
            what = "a worker process died (killed, or out of memory)"
            raise UserError(216, what, "try fewer --workers") from error
        if isinstance(found, dict):
            raise UserError(**found)
        return found

    def oldest() -> Iterator[tuple[Piece, np.ndarray]]:
        batch, future = under_way.popleft()
        return zip(batch, future.result(), strict=True)

    with ThreadPoolExecutor(workers, "encoding", take_worker) as threads:
        try:
            for process, connection in _start_workers(tokenizer, dtype, workers):
                processes.append(process)
                connections.put(connection)
            for batch in _batches(pieces):
                under_way.append((batch, threads.submit(encode, [_sent(piece) for piece in batch])))
                if len(under_way) > _BATCHES_PER_WORKER * workers:
                    yield from oldest()
            while under_way:
                yield from oldest()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
                process.join()


def _sent(piece: Piece) -> str | int:
    """Return what of a piece is to be encoded: its text, or the id that it has already."""
    return piece.text if piece.id is None else piece.id


def _ids(encode: Callable[[str], list[int]], text: str | int, dtype: np.dtype) -> np.ndarray:
    return np.array([text] if isinstance(text, int) else encode(text), dtype)


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


def _start_workers(tokenizer: Path, dtype: np.dtype, workers: int) -> Iterator[tuple[BaseProcess, Connection]]:
    """Yield worker processes, each started while Ctrl-C is held back."""
    context = multiprocessing.get_context("spawn")
    for _ in range(workers):
        with ctrl_c_held():
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, tokenizer, dtype), daemon=True)
            process.start()
            theirs.close()  # ours ends when the worker does
        yield process, ours


def _work(connection: Connection, path: Path, dtype: np.dtype) -> None:
    """Encode what comes until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    encode = open_tokenizer(path).encode
    try:
        while True:
            texts = connection.recv()
            try:
                connection.send([_ids(encode, text, dtype) for text in texts])
            except UserError as error:  # itself it cannot be pickled
                connection.send({"code": error.code, "what": error.what, "do": error.do, "where": error.where})
    except (EOFError, ConnectionError, MemoryError):
        return
