"""Read rank files, in tiktoken's format: one line for each token, its bytes in base64 and its rank.

Such a file holds the byte pairs in the order of their merges, but neither the pattern that first splits text into
words nor the special tokens. Both are in a file next to it, NAME.tiktoken.json:

    {"pattern": "\\\\s+|\\\\S+", "special_tokens": {"<|endoftext|>": 100257}, "eod": "<|endoftext|>"}

For two published vocabularies, recognised by the names of their files, both are in this module.
"""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import parse_object, read_file
from megazero.data.tokenizers.common import Tokenizer

_BESIDE_BYTES, _PATTERN = 1 << 20, 4096  # bytes of the file next to it, characters of a pattern
_END = "<|endoftext|>"
# Sources: GPT-2, encoder.py; tiktoken 0.14, tiktoken_ext/openai_public.py (without possessive quantifiers).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
_GPT4 += r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s+$|\s*[\r\n]|\s+(?!\S)|\s"
PUBLISHED = {"r50k_base": (_GPT2, 50256), "cl100k_base": (_GPT4, 100257)}  # the pattern, and the id of _END


class RankFile(Tokenizer):
    """A rank file.

    Raises:
        UserError: 162 tiktoken is not installed, 209 a missing or invalid file, 210 the pattern and the end-of-document
            id are unknown.
    """

    def __init__(self, path: str | Path):
        do = "repair the pattern, or give the complete file"
        self._open(path, self._read, "not usable as a rank file", do, ("tiktoken", "tiktoken"))

    def _read(self, content: bytes) -> None:
        import tiktoken

        described, ranks = self._described(), ranks_of(content, self.path)
        special: dict[str, int] = described["special_tokens"]
        self.vocab_size = max(*ranks.values(), *special.values()) + 1
        self._require_size()
        self._known = {*ranks.values()}
        if odd := next((name for name, i in special.items() if i in self._known), None):
            what = f"special token {odd!r:.40} has the id {special[odd]}, which is also a rank"
            raise UserError(209, what, "give it an unused id", where=f"{self.path}.json")
        self.eod = special[described["eod"]]
        self.bos = special[described.get("bos") or described["eod"]]
        self.specials = special
        self._sizes = np.zeros(self.vocab_size, np.int64)
        for token, rank in ranks.items():
            self._sizes[rank] = len(token)
        made_of = {"pat_str": described["pattern"], "mergeable_ranks": ranks, "special_tokens": special}
        self._library = tiktoken.Encoding(self.path.name, **made_of)
        self.lossless = self._gives_back()
        self.fingerprint = xxhash.xxh3_64_hexdigest(content + json.dumps(described, sort_keys=True).encode())
        self.files = {self.path.name: content, f"{self.path.name}.json": json.dumps(described, indent=1).encode()}

    def _encode(self, text: str) -> list[int]:
        return self._library.encode_ordinary(text)

    def _decode(self, ids: list[int]) -> str:
        return self._library.decode([i for i in ids if i in self._known])

    def _described(self) -> dict[str, Any]:
        """Return the pattern, the special tokens and the name of the one that ends a document.

        Raises:
            UserError: 209, the file next to it is invalid; 210, it is missing.
        """
        beside = self.path.with_name(f"{self.path.name}.json")
        if not beside.exists():
            if self.path.stem in PUBLISHED:
                pattern, end = PUBLISHED[self.path.stem]
                return {"pattern": pattern, "special_tokens": {_END: end}, "eod": _END}
            what = f"pattern and end-of-document token are unknown: there is no {beside.name}"
            raise UserError(210, what, 'create it, with "pattern", "special_tokens" and "eod"', where=self.path)
        try:
            found = parse_object(read_file(beside, _BESIDE_BYTES))
            pattern, special, end = (found.get(key) for key in ("pattern", "special_tokens", "eod"))
            if not isinstance(pattern, str) or not 0 < len(pattern) <= _PATTERN:
                raise ValueError(f'expected under "pattern" a text of at most {_PATTERN:,} characters')
            if not isinstance(special, dict) or not all(type(i) is int and i >= 0 for i in special.values()):
                raise ValueError('expected under "special_tokens" an object of names with their ids')
            begin = end if found.get("bos") is None else found["bos"]
            if odd := [name for name in (end, begin) if name not in [*special]]:
                raise ValueError(f'expected under "eod" and "bos" special tokens, got {odd[0]!r:.40}')
        except (OSError, ValueError) as error:
            raise UserError(209, f"cannot be read: {error}", "repair it", where=beside) from error
        return {key: found[key] for key in ("pattern", "special_tokens", "eod", "bos") if key in found}


def ranks_of(content: bytes, path: Path) -> dict[bytes, int]:
    """Return the rank of each token, which is its id. Raises UserError 209: not a complete rank file."""
    found, do = dict[bytes, int](), "give the complete rank file"
    for number, line in enumerate(filter(None, content.splitlines()), start=1):
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            what = f"line {number:,}: expected a token in base64 and its rank, got {line[:40]!r}"
            raise UserError(209, what, do, where=path) from None
    if len({*found.values()}) != len(found) or min(found.values(), default=0) < 0:
        raise UserError(209, "expected for each token a different rank of at least 0", do, where=path)
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise UserError(209, f"expected a token for each of 256 bytes, got none for byte {missing[0]}", do, where=path)
    return found
