"""Turn text into ids and back: what every tokenizer offers, and which kind a file is.

    *.model          SentencePiece                                  data/tokenizers/sentence_piece.py
    tokenizer.json   the tokenizers library (any other *.json too)  data/tokenizers/json_file.py
    *.tiktoken       byte pairs with their ranks                    data/tokenizers/rank_file.py
    bytes            no file: the bytes of the text                 data/tokenizers/plain_bytes.py

A tokenizer is lossless where each text comes back from its ids, byte for byte. Others are taken as well: then a loss in
bits per byte counts the bytes of the text that the data was made from (`data/origin.py`), not those that ids decode to.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from megazero.base.errors import UserError
from megazero.base.held_stderr import stderr_held
from megazero.data.tokenizers import plain_bytes
from megazero.data.tokenizers.json_file import JsonFile
from megazero.data.tokenizers.plain_bytes import PlainBytes
from megazero.data.tokenizers.rank_file import RankFile
from megazero.data.tokenizers.sentence_piece import SentencePiece


class Tokenizer(Protocol):
    """The protocol of every kind of tokenizer.

    Attributes:
        path: the file.
        vocab_size: ids lie in [0, vocab_size).
        eod: the id that ends a document.
        bos: the id that begins a text; eod where there is none.
        specials: the names of special ids, with those of eod and bos; in a text they are text.
        lossless: each text comes back from its ids; also the bytes of ids add up to those of their text.
        cuts_after_newline: a text may be cut after any newline: its ids are those of its parts, end to end.
        fingerprint: 16 hex digits of the content; equal fingerprints mean equal ids.
        files: names and contents from which the same tokenizer can be opened in another folder.
    """

    path: Path
    vocab_size: int
    eod: int
    bos: int
    lossless: bool
    cuts_after_newline: bool
    fingerprint: str

    @property
    def specials(self) -> Mapping[str, int]: ...

    @property
    def files(self) -> Mapping[str, bytes]: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without end-of-document.

        Raises:
            UserError: 212, half a surrogate pair, which is no text; 209, the library fails over the text.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special ids; bytes that are not UTF-8 come as U+FFFD.

        Raises:
            UserError: 209, the library fails over the ids.
        """
        ...

    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes of text that each id stands for, int64 [vocab_size]; 0 for special ids.

        Of a lossless tokenizer token_bytes()[encode(text)].sum() == len(text.encode()), so the mean loss of a text in
        bits per byte is sum(loss in nats) / ln 2 / sum(token_bytes of its targets).
        """
        ...


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
        tokenizer = _kind(str(path))
    for line in lines:
        print(line, file=sys.stderr)
    if vocab is not None and tokenizer.vocab_size > vocab:
        what = f"the tokenizer has {tokenizer.vocab_size} pieces, model.vocab is {vocab}"
        raise UserError(112, what, "raise model.vocab or give the model's tokenizer", where=path)
    return tokenizer


def _kind(path: str) -> Tokenizer:
    if path == plain_bytes.NAME:
        return PlainBytes()
    if path.endswith(".json"):
        return JsonFile(path)
    if path.endswith(".tiktoken"):
        return RankFile(path)
    return SentencePiece(path)
