"""Run SentencePiece's trainer in a process of its own.

The library trains for seconds to minutes in one call, and a signal's handler runs when that returns: Ctrl-C would wait
for it. So it runs in a child, which is killed when this process stops waiting, and ends when this process does.
"""

import io
import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

import sentencepiece

from data_tools.ctrl_c import ctrl_c_held
from megazero.data.tokenizers.common import SPACE_MARK

SENTENCE_BYTES = 16_384  # the library drops longer ones; ours are cut to fit
SETTINGS = {  # of the library's trainer
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n", "\t"],
    "split_digits": True,
    "character_coverage": 0.9999,
    "required_chars": SPACE_MARK,  # without a piece of its own a space is spelt in bytes and read back as the mark
    "max_sentence_length": SENTENCE_BYTES,
    "minloglevel": 2,  # errors only
}


class TrainingError(Exception):
    """An error of the trainer: the library's complaint, or how its process ended."""


def train_apart(sample: list[str], vocab: int) -> bytes:
    """Return the model of a vocabulary. Raises TrainingError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_be, args=(theirs, vocab), daemon=True)
    with ctrl_c_held():  # inherited: a terminal sends it to the child as well, which this process ends
        child.start()
    theirs.close()
    try:
        ours.send(sample)  # not an argument: `start` would wait for ever for a child that dies before it reads them
        model, complaint = ours.recv()
    except (EOFError, OSError):  # OSError without a number: the pipe ended within a message
        raise TrainingError("its process died (killed, or out of memory)") from None
    finally:
        child.kill()
        child.join()
        ours.close()
    if complaint:
        raise TrainingError(complaint)
    return model


def _be(parent: Connection, vocab: int) -> None:
    """Train in the child process on the sample that comes, and send the model or the complaint."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sample = parent.recv()
    try:
        parent.send((_train(sample, vocab), ""))
    except (RuntimeError, MemoryError) as error:
        parent.send((b"", str(error) or type(error).__name__))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child only"
    parent.join()
    os._exit(1)


def sentences(sample: Iterable[str]) -> Iterator[str]:
    """Yield lines, with their ends, none longer than the library reads (a character has at most 4 bytes)."""
    size = SENTENCE_BYTES // 4
    for text in sample:
        for line in text.replace("\0", "").splitlines(keepends=True):  # the library drops lines with a NUL
            yield from (line[start : start + size] for start in range(0, len(line), size))


def _train(sample: list[str], vocab: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(sample), model_writer=model, vocab_size=vocab, **SETTINGS
    )
    return model.getvalue()
