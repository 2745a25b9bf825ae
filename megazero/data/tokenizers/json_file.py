"""Read files of the tokenizers library: tokenizer.json, as published models have it.

The file defines how text becomes ids, but not which id ends a document: this is the eos_token of the
tokenizer_config.json next to it, or the one known name among the special tokens. The name of a special token in a text
is encoded as plain text, and no id is put before or after a text.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import parse_object, read_file
from megazero.data.tokenizers.common import BESIDE_BYTES, CHAT_TEMPLATE, CONFIG, SPACE_MARK, Tokenizer, config_beside

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_CARRIED = ("chat_template", "model_max_length", "padding_side")  # further keys of tokenizer_config.json that are kept
_WHOLE = "give a complete tokenizer.json, as the tokenizers library writes it"


class JsonFile(Tokenizer):
    """A tokenizer.json.

    Raises:
        UserError: 162 the library is not installed, 209 a missing or invalid file, 210 no token that ends a document.
    """

    def __init__(self, path: str | Path):
        self._open(path, self._read, "not a file of the tokenizers library", _WHOLE, ("tokenizers", "hf"))

    def _read(self, content: bytes) -> None:
        import tokenizers

        described = parse_object(content)
        if (described.get("model") or {}).get("dropout"):
            raise ValueError(f"model.dropout {described['model']['dropout']!s:.20} draws ids at random: remove it")
        self._library = tokenizers.Tokenizer.from_str(content.decode())
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._require_size()
        added = self._library.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        beside = config_beside(self.path)
        roles = self._roles(beside, special, vocabulary)
        self.bos, self.eod = (vocabulary[roles[role]] for role in ("bos_token", "eos_token"))
        self.specials = special | {name: vocabulary[name] for role, name in roles.items() if role != "unk_token"}
        by_bytes = '"ByteLevel"' in json.dumps(described.get("decoder"))  # alone, or in a sequence
        self._sizes = np.zeros(self.vocab_size, np.int64)
        for token, i in vocabulary.items():
            if token not in special:
                self._sizes[i] = len(_text(token).encode()) if i in added else _piece_bytes(token, by_bytes=by_bytes)
        if self.eod not in added:
            self._require_no_text(roles["eos_token"])
        self.lossless = self._gives_back()
        self.fingerprint = xxhash.xxh3_64_hexdigest(content + f"{self.bos} {self.eod}".encode())
        told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
        told |= {key: beside[key] for key in _CARRIED if key in beside}
        self.files = {"tokenizer.json": content, CONFIG: json.dumps(told, indent=1).encode()}
        if (template := self.path.with_name(CHAT_TEMPLATE)).exists():
            self.files[CHAT_TEMPLATE] = read_file(template, BESIDE_BYTES)

    def _encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=True)

    def _require_no_text(self, end: str) -> None:
        """Refuse an end-of-document id to which ordinary text can encode, too. Raises UserError 209."""
        text = self._library.decode([self.eod], skip_special_tokens=False)
        if self._sizes[self.eod] == 1 or self.eod in self.encode(text):
            what = f"{end!r:.40} (id {self.eod}) ends a document, but text can encode to it as well"
            raise UserError(209, what, f"name a special token as eos_token in {CONFIG}", where=self.path)

    def _roles(self, config: dict[str, Any], special: dict[str, int], vocabulary: dict[str, int]) -> dict[str, str]:
        """Return {role: token} for bos_token and eos_token, and for pad_token and unk_token if `config` names them.

        `config`: the content of tokenizer_config.json. Raises UserError 210: the token that ends a document is unknown.
        """
        found = {role: config.get(role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")}
        found = {role: value.get("content") if isinstance(value, dict) else value for role, value in found.items()}
        named = {role: name for role, name in found.items() if isinstance(name, str) and name in vocabulary}
        known = [name for name in _ENDS if name in special]
        if "eos_token" not in named and len(known) != 1:
            what = f"expected one token that ends a document, of {', '.join(_ENDS)}, got {len(known)}"
            raise UserError(210, what, f'put {CONFIG} next to it, with {{"eos_token": "NAME"}}', where=self.path)
        end = named.get("eos_token") or known[0]
        return {"bos_token": end, "eos_token": end} | named


def _piece_bytes(piece: str, *, by_bytes: bool) -> int:
    """Return the bytes of text that a piece of the model stands for.

    Args:
        by_bytes: each of its characters stands for one byte.
    """
    if by_bytes:
        return len(piece)
    return 1 if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") else len(_text(piece).encode())


def _text(piece: str) -> str:
    return piece.replace(SPACE_MARK, " ").removeprefix("##")
