"""Files of the tokenizers library: tokenizer.json, as published models have it.

The file says how text becomes ids. Which id ends a document it does not say: that is the eos_token of the
tokenizer_config.json beside it, or the one known name among the special tokens. A special token that stands in a text
is text here, as everything in it; nothing is put before or behind it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import parse_object, read_file
from megazero.data.tokenizers.common import (
    BESIDE_BYTES,
    CHAT_TEMPLATE,
    CONFIG,
    MOST_IDS,
    SPACE_MARK,
    config_beside,
    gives_back,
    guarded,
    in_use,
    read_tokenizer,
    require_extra,
    require_sizes,
    require_text,
)

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_CARRIED = ("chat_template", "model_max_length", "padding_side")  # what else of tokenizer_config.json stays
_WHOLE = "give a whole tokenizer.json, as the tokenizers library writes it"


class JsonFile:
    """A tokenizer.json; the attributes are those of the protocol `Tokenizer`.

    Raises:
        UserError: 162 the library is not installed, 209 no such file or not such a file, 210 nothing ends a document.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        content = read_tokenizer(self.path)
        require_extra("tokenizers", "hf", self.path)
        with guarded(self.path, "not a file of the tokenizers library", _WHOLE):
            self._read(content)

    def _read(self, content: bytes) -> None:
        described = _parse(content)
        self._library = _open(content)
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        require_sizes(self.vocab_size, self.path)
        added = self._library.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        beside = config_beside(self.path)
        roles = self._roles(beside, special, vocabulary)
        self.bos, self.eod = (vocabulary[roles[role]] for role in ("bos_token", "eos_token"))
        self.specials = special | {name: vocabulary[name] for role, name in roles.items() if role != "unk_token"}
        self._sizes = _sizes(described, vocabulary, special, self.vocab_size)
        if self.eod not in added:
            self._require_no_text(roles["eos_token"])
        self.lossless = gives_back(self)
        self.cuts_after_newline = False
        self.fingerprint = xxhash.xxh3_64_hexdigest(content + f"{self.bos} {self.eod}".encode())
        told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
        told |= {key: beside[key] for key in _CARRIED if key in beside}
        self.files = {"tokenizer.json": content, CONFIG: json.dumps(told, indent=1).encode()} | self._template()

    def encode(self, text: str) -> list[int]:
        require_text(text)
        with in_use(self.path):
            return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        with in_use(self.path):
            return self._library.decode(ids, skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        return self._sizes

    def _require_no_text(self, end: str) -> None:
        """Refuse an end of documents that ordinary text gives as well. Raises UserError 209."""
        text = self._library.decode([self.eod], skip_special_tokens=False)
        if self._sizes[self.eod] == 1 or self.eod in self.encode(text):
            what = f"{end!r:.40} (id {self.eod}) ends a document, but text gives it as well"
            raise UserError(209, what, f"name a special token as eos_token in {CONFIG}", where=self.path)

    def _template(self) -> dict[str, bytes]:
        """Return the file of a chat template beside it, by its name, if there is one. Raises UserError 209."""
        path = self.path.with_name(CHAT_TEMPLATE)
        try:
            return {CHAT_TEMPLATE: read_file(path, BESIDE_BYTES)} if path.exists() else {}
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
            raise UserError(209, what, "mend it or take it away", where=path) from error

    def _roles(self, told: dict[str, Any], special: dict[str, int], vocabulary: dict[str, int]) -> dict[str, str]:
        """Return the token of each role: what begins a text, ends a document, and what else is told. Raises 210."""
        named = {}
        for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = told.get(role)
            name = value.get("content") if isinstance(value, dict) else value
            if isinstance(name, str) and name in vocabulary:
                named[role] = name
        known = [name for name in _ENDS if name in special]
        if "eos_token" not in named and len(known) != 1:
            what = f"which token ends a document? Of {', '.join(_ENDS)} it has {len(known)}"
            do = f'put {CONFIG} beside it, with {{"eos_token": "NAME"}}'
            raise UserError(210, what, do, where=self.path)
        end = named.get("eos_token") or known[0]
        return {"bos_token": end, "eos_token": end} | named


def _parse(content: bytes) -> dict[str, Any]:
    """Return the JSON. Raises ValueError: the library would not make a function of the text of it."""
    described = parse_object(content)
    model = described.get("model")
    if not isinstance(model, dict):
        raise ValueError("expected a model in it")
    if model.get("dropout"):
        raise ValueError(f"model.dropout {model['dropout']!s:.20} draws ids at random: take it out")
    ids = model.get("vocab")
    added = described.get("added_tokens") or []
    values = ids.values() if isinstance(ids, dict) else ()
    values = [*values, *(token.get("id") for token in added if isinstance(token, dict))]
    if odd := next((value for value in values if not isinstance(value, int) or not 0 <= value < MOST_IDS), None):
        raise ValueError(f"expected ids below {MOST_IDS:,}, got {odd!s:.20}")
    return described


def _open(content: bytes) -> Any:
    import tokenizers

    library = tokenizers.Tokenizer.from_str(content.decode())
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


def _sizes(
    described: dict[str, Any], vocabulary: dict[str, int], special: dict[str, int], vocab_size: int
) -> np.ndarray:
    """Return the bytes of text that each id stands for, int64 [vocab_size]."""
    added = {token["content"] for token in described.get("added_tokens") or ()}
    by_bytes = _has(described.get("decoder"), "ByteLevel")
    sizes = np.zeros(vocab_size, np.int64)
    for token, i in vocabulary.items():
        if token in special:
            continue
        if token not in added and by_bytes:
            sizes[i] = len(token)  # each character is the picture of one byte
        elif token not in added and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            sizes[i] = 1
        else:
            sizes[i] = len(token.replace(SPACE_MARK, " ").removeprefix("##").encode())
    return sizes


def _has(part: Any, kind: str) -> bool:
    """Return whether a part of the file is of a kind, or is a sequence with one."""
    if not isinstance(part, dict):
        return False
    return part.get("type") == kind or any(_has(inner, kind) for inner in part.get("decoders") or ())
