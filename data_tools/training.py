"""Run SentencePiece's trainer, with the settings of a vocabulary that loses nothing."""

import io
import signal
from collections.abc import Iterable, Iterator

import sentencepiece

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


def train(sample: list[str], vocab: int) -> bytes:
    """Return the model of a vocabulary. Raises RuntimeError: the library's complaint.

    The library trains for seconds to minutes in one call, and Python's handlers of signals run when that returns. So
    Ctrl-C ends the process at once meanwhile, as the system does it.
    """
    model = io.BytesIO()
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(sample), model_writer=model, vocab_size=vocab, **SETTINGS
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    return model.getvalue()


def sentences(sample: Iterable[str]) -> Iterator[str]:
    """Yield lines, with their ends, none longer than the library reads (a character has at most 4 bytes)."""
    size = SENTENCE_BYTES // 4
    for text in sample:
        for line in text.replace("\0", "").splitlines(keepends=True):  # the library drops lines with a NUL
            yield from (line[start : start + size] for start in range(0, len(line), size))
