"""Train a lossless SentencePiece BPE vocabulary.

    megazero tokenizer --input books/ --output books.model --vocab 8192

The text is used as it is: no normalisation, all white space kept, runs of spaces may be pieces (indentation is most of
a program), newline and tab are pieces of their own, digits stand alone, and characters without a piece are spelled in
bytes. Ids: <unk> 0, <s> 1, </s> 2 (end of document), newline 3, tab 4, then 256 bytes, then the learned pieces; exactly
--vocab ids in all. A large corpus is sampled evenly, so memory does not grow with it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository; this folder's inspect.py would hide Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from data_tools import run_script

    run_script(__file__)  # does not return

import argparse
import io
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from data_tools.command import Parser, add_inputs, positive, run
from data_tools.corpus import Reader, find_files
from data_tools.selection import Select
from megazero.base.answers import answer, tell
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import write_atomically
from megazero.data.tokenizer import open_tokenizer
from megazero.data.tokenizers.common import SPACE_MARK

SAMPLE_BYTES = 64_000_000  # more text changes a vocabulary of this kind little
CHECK_BYTES = 4_000_000  # of the sample, for the round-trip check at the end
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
    "required_chars": SPACE_MARK,  # without a piece of its own, a space is spelled in bytes and decoded as the mark
    "max_sentence_length": SENTENCE_BYTES,
    "minloglevel": 2,  # errors only
}


def train_tokenizer(options: argparse.Namespace) -> None:
    """Train a SentencePiece model on text files."""
    started = time.monotonic()
    with doing("finding files"):
        files = find_files(options.input, options.suffix)
    reader = Reader(files, Select(tuple(options.field)), skip_bad=options.skip_bad)
    sample = _sample(reader, sum(path.stat().st_size for path in files))
    reader.counts.list_skipped(options.output, tell)
    if not any(text.replace("\0", "").strip() for text in sample):
        raise UserError(214, "expected text, got none but white space", "check --input", where=options.input[0])
    model = _train(sample, options.vocab)
    with doing("checking the vocabulary"):
        ratio = _check(model, sample)
    write_atomically(options.output, model)
    used = sum(len(text.encode()) for text in sample)
    part = f" in the first {min(used, CHECK_BYTES) / 1e6:,.0f} MB of them" if used > CHECK_BYTES else ""
    left_out = f" ({reader.counts.rejected:,} skipped as bad)" if reader.counts.rejected else ""
    ending = f"{used:,} bytes{left_out}, {ratio:.3f} bytes per token{part}, {time.monotonic() - started:.1f} s"
    answer(f"{options.output}: {options.vocab:,} pieces from {ending}")


def _sample(reader: Reader, total: int) -> list[str]:
    """Return about SAMPLE_BYTES of text, spread evenly over a corpus of `total` bytes; all of a smaller corpus."""
    share = min(1.0, SAMPLE_BYTES / max(total, 1))
    sample, seen, kept = [], 0, 0
    with doing("reading the text, MB", total // 1_000_000) as progress:
        for piece in reader:
            size = len(piece.text)
            if size and kept <= share * seen:
                sample.append(piece.text)
                kept += size
            seen += size
            progress.done = reader.bytes_read // 1_000_000
    return sample


def _train(sample: list[str], vocab: int) -> bytes:
    """Train a vocabulary; return its model file. Raises UserError 215: the library fails, as on too little text.

    The library trains for seconds to minutes in one call, and Python runs signal handlers only when the call returns.
    So SIGINT has the system's default action during the call: Ctrl-C ends the process at once.
    """
    model, given = io.BytesIO(), {"sentence_iterator": sentences(sample), "vocab_size": vocab}
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with doing("training the vocabulary"):
            sentencepiece.SentencePieceTrainer.train(model_writer=model, **given, **SETTINGS)
    except RuntimeError as error:
        what = f"no vocabulary of {vocab:,} pieces from this text: {str(error).rpartition('] ')[2]}"
        raise UserError(215, what, "use more text, or another --vocab") from error
    finally:
        signal.signal(signal.SIGINT, handler)
    return model.getvalue()


def sentences(sample: Iterable[str]) -> Iterator[str]:
    """Yield lines with their line ends, none longer than the library reads (a character has at most 4 bytes)."""
    size = SENTENCE_BYTES // 4
    for text in sample:
        for line in text.replace("\0", "").splitlines(keepends=True):  # the library drops lines with a NUL
            yield from (line[start : start + size] for start in range(0, len(line), size))


def _check(model: bytes, sample: list[str]) -> float:
    """Return bytes per token on a part of the sample; check that decoding its ids gives the same text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.model")
        path.write_bytes(model)
        tokenizer = open_tokenizer(path)
    num_bytes = num_tokens = 0
    for text in sample:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, "a vocabulary with all bytes and identity normalisation loses nothing"
        num_bytes += len(text.encode())
        num_tokens += len(ids)
        if num_bytes >= CHECK_BYTES:
            break
    return num_bytes / num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (command.py)."""
    parser = Parser(prog="megazero tokenizer", description="Train a lossless SentencePiece BPE vocabulary.")
    add_inputs(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="MODEL", help="the model file to write")
    parser.add_argument("--vocab", required=True, type=positive, help="number of ids")
    return run(train_tokenizer, parser, argv)
