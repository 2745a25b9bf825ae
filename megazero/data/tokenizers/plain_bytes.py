"""The bytes of a text as its ids: a tokenizer without a file."""

from pathlib import Path

import numpy as np
import xxhash

from megazero.data.tokenizers.common import Tokenizer

NAME = "bytes"  # in place of a file's path


class PlainBytes(Tokenizer):
    """The bytes of UTF-8 as ids 0 to 255; 256 ends a document."""

    def __init__(self) -> None:
        self.path = Path(NAME)
        self.vocab_size = 257
        self.eod = self.bos = 256
        self.lossless = self.cuts_after_newline = True
        self.specials = {"<eod>": self.eod}
        self.fingerprint = xxhash.xxh3_64_hexdigest(b"bytes, and 256 as the end")
        self.files = {}
        self._sizes = np.array([1] * 256 + [0])

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
