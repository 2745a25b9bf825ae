"""Turn text into ids and back: open a tokenizer of the kind that the name of its file tells.

    *.model          SentencePiece                                  data/tokenizers/sentence_piece.py
    tokenizer.json   the tokenizers library (any other *.json too)  data/tokenizers/json_file.py
    *.tiktoken       byte pairs with their ranks                    data/tokenizers/rank_file.py
    bytes            no file: the bytes of the text                 data/tokenizers/plain_bytes.py

A tokenizer is lossless if decoding the ids of any text gives the same text, byte for byte. Others are accepted as well:
a loss in bits per byte then counts the bytes of the original text (`data/origin.py`), not those that ids decode to.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.base.errors import UserError
from megazero.data.tokenizers.common import Tokenizer as Tokenizer
from megazero.data.tokenizers.json_file import JsonFile
from megazero.data.tokenizers.plain_bytes import NAME, PlainBytes
from megazero.data.tokenizers.rank_file import RankFile
from megazero.data.tokenizers.sentence_piece import SentencePiece

_KINDS = {".json": JsonFile, ".tiktoken": RankFile}  # by the suffix of the file's name; SentencePiece for any other


def open_tokenizer(path: str | Path, vocab: int | None = None) -> Tokenizer:
    """Open a tokenizer; the name of its file determines its kind.

    Args:
        path: the file, or "bytes".
        vocab: the number of ids of the model; None: any.

    Raises:
        UserError: 112, it has more ids than the model; 162, it needs a package that is not installed; 209, it cannot be
            read; 210, it has no end-of-document id.
    """
    lines: list[str] = []
    with _stderr_held(lines):  # a library that panics writes a traceback before our one-line error
        tokenizer = PlainBytes() if str(path) == NAME else _KINDS.get(Path(path).suffix, SentencePiece)(path)
    for line in lines:
        print(line, file=sys.stderr)
    if vocab is not None and tokenizer.vocab_size > vocab:
        what = f"the tokenizer has {tokenizer.vocab_size} pieces, model.vocab is {vocab}"
        raise UserError(112, what, "raise model.vocab or give the model's tokenizer", where=path)
    return tokenizer


@contextmanager
def _stderr_held(lines: list[str]) -> Iterator[None]:
    """Capture all output to file descriptor 2 inside the context; append its lines to `lines` at the end."""
    try:
        sys.stderr.flush()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the `with` below
        real = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no standard error, or no room for a file
        yield
        return
    with said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            said.seek(0)
            lines += said.read().decode(errors="replace").splitlines()
