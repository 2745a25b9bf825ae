"""Turn text into ids and back: what every tokenizer offers, and which kind a file is.

    *.model          SentencePiece                                  data/tokenizers/sentence_piece.py
    tokenizer.json   the tokenizers library (any other *.json too)  data/tokenizers/json_file.py
    *.tiktoken       byte pairs with their ranks                    data/tokenizers/rank_file.py
    bytes            no file: the bytes of the text                 data/tokenizers/plain_bytes.py

A tokenizer is lossless where each text comes back from its ids, byte for byte. Others are taken as well: then a loss in
bits per byte counts the bytes of the text that the data was made from (`data/origin.py`), not those that ids decode to.
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

_KINDS = {".json": JsonFile, ".tiktoken": RankFile}  # by the end of the file's name; SentencePiece for any other


def open_tokenizer(path: str | Path, vocab: int | None = None) -> Tokenizer:
    """Open a tokenizer, of the kind that the name of its file says.

    Args:
        path: the file, or "bytes".
        vocab: the ids of the model that it is for; None: any.

    Raises:
        UserError: 112, it has more ids than the model; 162, it needs a package that is not installed; 209, it cannot be
            read; 210, nothing in it ends a document.
    """
    lines: list[str] = []
    with _stderr_held(lines):  # a library that panics writes its own traceback before ours is one line
        tokenizer = PlainBytes() if str(path) == NAME else _KINDS.get(Path(path).suffix, SentencePiece)(path)
    for line in lines:
        print(line, file=sys.stderr)
    if vocab is not None and tokenizer.vocab_size > vocab:
        what = f"the tokenizer has {tokenizer.vocab_size} pieces, model.vocab is {vocab}"
        raise UserError(112, what, "raise model.vocab or give the model's tokenizer", where=path)
    return tokenizer


@contextmanager
def _stderr_held(lines: list[str]) -> Iterator[None]:
    """Keep all that reaches file descriptor 2 inside the context; at its end the lines are in `lines`."""
    try:
        sys.stderr.flush()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, in what may not be skipped
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
