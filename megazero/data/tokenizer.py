"""Turn text into ids and back: what every tokenizer offers, and which kind a file is.

    *.model          SentencePiece                                  data/tokenizers/sentence_piece.py
    tokenizer.json   the tokenizers library (any other *.json too)  data/tokenizers/json_file.py
    *.tiktoken       byte pairs with their ranks                    data/tokenizers/rank_file.py
    bytes            no file: the bytes of the text                 data/tokenizers/plain_bytes.py

A tokenizer is lossless where each text comes back from its ids, byte for byte. Others are taken as well: then a loss in
bits per byte counts the bytes of the text that the data was made from (`data/origin.py`), not those that ids decode to.
"""

import sys
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.held_stderr import stderr_held
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
    with stderr_held(lines):  # a library that panics writes its own traceback before ours is one line
        tokenizer = PlainBytes() if str(path) == NAME else _KINDS.get(Path(path).suffix, SentencePiece)(path)
    for line in lines:
        print(line, file=sys.stderr)
    if vocab is not None and tokenizer.vocab_size > vocab:
        what = f"the tokenizer has {tokenizer.vocab_size} pieces, model.vocab is {vocab}"
        raise UserError(112, what, "raise model.vocab or give the model's tokenizer", where=path)
    return tokenizer
