"""Rank files, as tiktoken reads them: one line for each token, its bytes in base64 and its rank.

Such a file holds the byte pairs in the order in which they are merged, and neither the pattern that splits text into
words before, nor the special tokens. Both are in a file beside it, NAME.tiktoken.json:

    {"pattern": "\\\\s+|\\\\S+", "special_tokens": {"<|endoftext|>": 100257}, "eod": "<|endoftext|>"}

For two published vocabularies, which are known by the names of their files, that is written down here.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import parse_object, read_file
from megazero.data.tokenizers.common import (
    gives_back,
    read_tokenizer,
    require_extra,
    require_sizes,
    require_text,
)

_BESIDE_BYTES, _PATTERN = 1 << 20, 4096  # bytes of the file beside it, characters of a pattern
_END = "<|endoftext|>"
# Sources: GPT-2, encoder.py; Llama 3, tokenizer.py, whose pattern is that of cl100k_base.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "r50k_base": {
        "pattern": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        "special_tokens": {_END: 50256},
        "eod": _END,
    },
    "cl100k_base": {
        "pattern": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "special_tokens": {_END: 100257},
        "eod": _END,
    },
}


class RankFile:
    """A rank file; the attributes are those of the protocol `Tokenizer`.

    Raises:
        UserError: 162 tiktoken is not installed, 209 no such file or not such a file, 210 nothing says how it splits
            text or which id ends a document.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        content = read_tokenizer(self.path)
        require_extra("tiktoken", "tiktoken", self.path)
        ranks = ranks_of(content, self.path)
        described = self._described()
        pattern, special = described["pattern"], described["special_tokens"]
        self.vocab_size = max(*ranks.values(), *special.values()) + 1
        require_sizes(self.vocab_size, self.path)
        self.eod: int = special[described["eod"]]
        self.bos: int = special.get(described.get("bos"), self.eod)
        self.specials: dict[str, int] = special
        self._special_ids = set(special.values())
        self._sizes = np.zeros(self.vocab_size, np.int64)
        for token, rank in ranks.items():
            self._sizes[rank] = len(token)
        import tiktoken

        try:
            self._library = tiktoken.Encoding(
                self.path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
            )
            self._known = {*ranks.values()}
            self.lossless = gives_back(self)
        except (ValueError, KeyError) as error:
            what = f"not usable as a rank file: {' '.join(str(error).split())[:120]}"
            raise UserError(209, what, "mend the pattern, or give the whole file", where=self.path) from None
        self.cuts_after_newline = False
        told = json.dumps(described, indent=1).encode()
        self.fingerprint = xxhash.xxh3_64_hexdigest(content + json.dumps(described, sort_keys=True).encode())
        self.files = {self.path.name: content, f"{self.path.name}.json": told}

    def encode(self, text: str) -> list[int]:
        require_text(text)
        return self._library.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self._library.decode([i for i in ids if i in self._known])

    def token_bytes(self) -> np.ndarray:
        return self._sizes

    def _described(self) -> dict[str, Any]:
        """Return the pattern, the special tokens and the name of the one that ends a document.

        Raises:
            UserError: 209, what is beside the file is wrong; 210, nothing is.
        """
        beside = self.path.with_name(f"{self.path.name}.json")
        if not beside.exists():
            if self.path.stem in _PUBLISHED:
                return _PUBLISHED[self.path.stem]
            what = f"which pattern splits text, and which id ends a document? There is no {beside.name}"
            raise UserError(210, what, 'put it there, with "pattern", "special_tokens" and "eod"', where=self.path)
        try:
            found = parse_object(read_file(beside, _BESIDE_BYTES))
            pattern, special, end = found.get("pattern"), found.get("special_tokens"), found.get("eod")
            if not isinstance(pattern, str) or not 0 < len(pattern) <= _PATTERN:
                raise ValueError(f'expected under "pattern" at most {_PATTERN:,} characters')
            if not isinstance(special, dict) or not all(type(i) is int and i >= 0 for i in special.values()):
                raise ValueError('expected under "special_tokens" names with their ids')
            if end not in special:
                raise ValueError('expected under "eod" one of the special tokens')
        except (OSError, ValueError, TypeError) as error:
            raise UserError(209, f"cannot be read: {error}", "mend it", where=beside) from error
        return {key: found[key] for key in ("pattern", "special_tokens", "eod", "bos") if key in found}


def ranks_of(content: bytes, path: Path) -> dict[bytes, int]:
    """Return the rank of each token, which is its id. Raises UserError 209."""

    def refuse(what: str) -> UserError:
        return UserError(209, what, "give the whole rank file", where=path)

    found: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise refuse(f"line {number:,}: expected a token in base64 and its rank, got {line[:40]!r}") from None
    ranks = set(found.values())
    if len(ranks) != len(found) or min(ranks, default=0) < 0:
        raise refuse(f"expected a rank for each token, got {len(ranks):,} for {len(found):,}")
    require_sizes(max(ranks, default=-1) + 1, path)
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise refuse(f"expected a token for each of 256 bytes, got none for byte {missing[0]}")
    return found
