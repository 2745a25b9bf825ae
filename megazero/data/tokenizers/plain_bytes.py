"""The bytes of a text as its ids: a tokenizer without a file."""

from pathlib import Path

import numpy as np
import xxhash

from megazero.data.tokenizers.common import require_text

NAME = "bytes"  # in place of a file's path


class PlainBytes:
    """The bytes of UTF-8 as ids 0 to 255; 256 ends a document. Attributes are those of the protocol `Tokenizer`."""

    def __init__(self) -> None:
        self.path = Path(NAME)
        self.vocab_size = 257
        self.eod = self.bos = 256
        self.lossless = self.cuts_after_newline = True
        self.specials = {"<eod>": self.eod}
        self.fingerprint = xxhash.xxh3_64_hexdigest(b"bytes, and 256 as the end")
        self.files: dict[str, bytes] = {}

    def encode(self, text: str) -> list[int]:
        require_text(text)
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        sizes = np.ones(self.vocab_size, np.int64)
        sizes[self.eod] = 0
        return sizes
