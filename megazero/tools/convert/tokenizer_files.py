"""Write the files from which transformers' `AutoTokenizer` loads one of our tokenizers.

They are a tokenizer.json and a tokenizer_config.json for every kind of tokenizer, next to the tokenizer's own files,
which an import uses again. A tokenizer that is a tokenizer.json is copied unchanged. Other kinds are described here,
with plain spaces in pieces, so that U+2581, SentencePiece's symbol for a space, is an ordinary character. Before the
files are written, their ids are compared with the tokenizer's on a set of texts.

Sources: tokenizers, bindings of Tokenizer.to_str (the format); sentencepiece, sentencepiece_model.proto and
bpe_model.cc (merges ordered by the score of the result); tiktoken, lib.rs (ordered by its rank).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sentencepiece
import xxhash

from megazero.base.errors import UserError
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizers.common import CONFIG, SPACE_MARK, require_extra
from megazero.data.tokenizers.json_file import JsonFile
from megazero.data.tokenizers.rank_file import RankFile, ranks_of
from megazero.data.tokenizers.sentence_piece import BPE, CHAR, USER_DEFINED, ModelProto, SentencePiece

JSON = "tokenizer.json"
_OWN = "megazero"  # the key of tokenizer_config.json that names the tokenizer's own file
_UNKNOWN = "\u2047"  # SentencePiece's text for an id without a text
_SAMPLED = 2000  # pieces of the vocabulary in the texts of the check
_TEXTS = (
    "The quick brown fox, 1234567890 times: it's here!\n\n\tdef f(x):\r\n        return [x ** 2, 'a_b']  # 3.14\n",
    "  a  b   c    d     e      f\n \n  \n\t\t \t ",
    "aaaaaaa abababab ananana -------- ======= ........ \n\n\n\n\n",
    "\u00e9 e\u0301 \ufb01 \u00a0\u3000\u200b\ufeff\u2581\u2581 x\u2581y \u4e2d\u6587\u65e5\u672c \u0440\u0443\u0441",
    "\U0001f600\U0001f469\u200d\U0001f467 \u0645\u0631\u062d\u0628\u0627 \ud7ff\U0010ffff <0x41> <0xE2> ##x \u0120",
    *(f"a{''.join(map(chr, range(first, first + 64)))}b" for first in range(0, 0x300, 64)),
)


def for_transformers(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the names and contents of the files that describe a tokenizer to transformers.

    Raises:
        UserError: 162, the package tokenizers is not installed; 415, no tokenizer.json gives the same ids.
    """
    if isinstance(tokenizer, JsonFile):
        return dict(tokenizer.files)
    names = {i: name for name, i in tokenizer.specials.items()}
    roles = {"bos_token": names[tokenizer.bos], "eos_token": names[tokenizer.eod]}
    if isinstance(tokenizer, SentencePiece):
        described, pad = _sentence_piece(tokenizer)
        roles |= {"pad_token": names[pad]} if pad in names else {}
    elif isinstance(tokenizer, RankFile):
        described = _rank_file(tokenizer)
    else:
        described = _byte_level({}, [])
    described = _with_specials(described, tokenizer.specials)
    content = json.dumps(described, ensure_ascii=False).encode()
    own = {"tokenizer": next(iter(tokenizer.files), str(tokenizer.path)), "of": xxhash.xxh3_64_hexdigest(content)}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles, _OWN: own}
    files = {JSON: content, CONFIG: json.dumps(told, indent=1).encode()}
    _prove(tokenizer, files)
    return {**tokenizer.files, **files}


def own_file(told: Mapping[str, Any], described: bytes) -> str | None:
    """Return the name of the tokenizer that an export of ours described; None: it is not ours, or changed since.

    Args:
        told: the content of tokenizer_config.json.
        described: the content of tokenizer.json.
    """
    own = told.get(_OWN)
    if not isinstance(own, dict) or own.get("of") != xxhash.xxh3_64_hexdigest(described):
        return None
    name = own.get("tokenizer")
    return name if isinstance(name, str) and Path(name).name == name else None


def _sentence_piece(tokenizer: SentencePiece) -> tuple[dict[str, Any], int]:
    """Return (the description of a SentencePiece model, its padding id or -1). Raises UserError 415: it has none."""
    (content,) = tokenizer.files.values()
    model, stored = sentencepiece.SentencePieceProcessor(model_proto=content), ModelProto.FromString(content)
    ids, rules, algorithm = range(model.vocab_size()), stored.normalizer_spec, stored.trainer_spec.model_type
    prefixed, collapses = rules.add_dummy_prefix, rules.remove_extra_whitespaces
    defined = {i for i in ids if stored.pieces[i].type == USER_DEFINED}
    pieces = [model.id_to_piece(i).replace(SPACE_MARK, " ") for i in ids]
    text = [i for i in ids if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))]
    if algorithm not in (BPE, CHAR):  # unigram: tokenizers sums scores in another precision, so ties may differ
        raise _refused(tokenizer, "only SentencePiece models of byte pairs or characters can be exported")
    if rules.precompiled_charsmap:  # tokenizers rewrites a character with its accents at once, and loses some
        raise _refused(tokenizer, "its normalization rules rewrite characters; the rule identity can be exported")
    if len({*pieces}) < len(pieces) or any(map(model.is_unused, text)):
        raise _refused(tokenizer, "it has unused pieces, or one piece twice")
    plain = sorted((i for i in text if i not in defined), key=lambda i: -model.get_score(i))
    merges = _merges([pieces[i] for i in plain]) if algorithm == BPE else []
    fallback = {"byte_fallback": any(map(model.is_byte, ids)), "fuse_unk": True, "unk_token": pieces[model.unk_id()]}
    kind = _bpe({piece: i for i, piece in enumerate(pieces)}, merges, **fallback)
    decoders: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefixed or collapses:
        decoders.append({"type": "Strip", "content": " ", "start": 1 << 16 if collapses else 1, "stop": 0})
    described = {"model": kind, "decoder": {"type": "Sequence", "decoders": decoders}}
    if normalizers := [*_normalizers(tokenizer.lossless, collapses, prefixed)]:
        described["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    # User-defined symbols are never part of a merge.
    described["added_tokens"] = [_added(i, pieces[i], special=False) for i in text if i in defined]
    return described, model.pad_id()


def _normalizers(lossless: bool, collapses: bool, dummy_prefix: bool) -> Iterator[dict[str, Any]]:
    """Yield the steps in which SentencePiece normalises a text before it encodes it."""
    if collapses:
        yield {"type": "Replace", "pattern": {"Regex": r"\A +"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if dummy_prefix:
        yield {"type": "Prepend", "prepend": " "}
    if not lossless:
        yield {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    if collapses:  # at the end also spaces that were marks
        yield {"type": "Replace", "pattern": {"Regex": r" +\z"}, "content": ""}


def _rank_file(tokenizer: RankFile) -> dict[str, Any]:
    """Return the description of a rank file: its pattern splits a text, then bytes are merged by rank."""
    content, told = tokenizer.files.values()
    ranks = ranks_of(content, tokenizer.path)
    pictures = _pictures()
    tokens = {"".join(map(pictures.__getitem__, token)): rank for token, rank in ranks.items()}
    described = _byte_level(tokens, _merges(sorted(tokens, key=tokens.__getitem__)))
    # tokenizers reads {1,3}+ as a repetition of {1,3}; the possessive form that is meant needs an atomic group.
    pattern = re.sub(r"(\\[pP]\{\w+\}|\[(?:\\.|[^\]])*\])(\{\d+,\d*\})\+", r"(?>\1\2)", json.loads(told)["pattern"])
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, described["pre_tokenizer"]]}
    return described


def _byte_level(tokens: Mapping[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the description of tokens of bytes, spelt by `_pictures`; empty `tokens` mean the 256 single bytes."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {**tokens} or {picture: byte for byte, picture in _pictures().items()}
    return {"model": _bpe(vocabulary, merges, ignore_merges=True), "pre_tokenizer": level, "decoder": level}


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    return {"type": "BPE", **options, "vocab": vocabulary, "merges": merges}


def _merges(tokens: list[str]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, in the order of these tokens."""
    known = {*tokens}
    cuts = ((token, at) for token in tokens for at in range(1, len(token)))
    return [(token[:at], token[at:]) for token, at in cuts if token[:at] in known and token[at:] in known]


def _pictures() -> dict[int, str]:
    """Return {byte: the character that stands for it}. Source: GPT-2, encoder.py, bytes_to_unicode."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def _with_specials(described: dict[str, Any], specials: Mapping[str, int]) -> dict[str, Any]:
    """Return a complete tokenizer.json with the special tokens, which are also added to the model's vocabulary."""
    described["model"]["vocab"] |= specials
    added = described.get("added_tokens", []) + [_added(i, name, special=True) for name, i in specials.items()]
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **parts, **described, "added_tokens": sorted(added, key=lambda token: token["id"])}


def _added(i: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, **flags, "special": special}


def _prove(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> None:
    """Refuse files that do not give a tokenizer's ids on the texts of the check. Raises UserError 162 and 415."""
    require_extra("tokenizers", "hf", tokenizer.path)
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            written = JsonFile(Path(folder) / JSON)
        except UserError as error:
            raise _refused(tokenizer, error.what) from None
    if (written.vocab_size, written.eod, written.bos) != (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos):
        raise _refused(tokenizer, "other special ids")
    for text in _texts(tokenizer):
        ids, found = tokenizer.encode(text), written.encode(text)
        back = tokenizer.decode(ids)
        if ids != found or (_UNKNOWN not in back and written.decode(ids) != back):
            at = next((n for n, (a, b) in enumerate(zip(ids, found, strict=False)) if a != b), 0)
            raise _refused(tokenizer, f"{ids[at : at + 3]} became {found[at : at + 3]} in {text[:9]!a}...")


def _texts(tokenizer: Tokenizer) -> Iterable[str]:
    yield from _TEXTS
    step = max(1, tokenizer.vocab_size // _SAMPLED)
    special = set(tokenizer.specials.values())
    pieces = [tokenizer.decode([i]) for i in range(0, tokenizer.vocab_size, step) if i not in special]
    for glue in ("", " ", "\n"):
        for first in range(0, len(pieces), 50):
            yield glue.join(pieces[first : first + 50])


def _refused(tokenizer: Tokenizer, why: str) -> UserError:
    what = f"no tokenizer.json gives the ids of this tokenizer ({why})"
    do = "remove data.tokenizer from config.yaml to export only weights"
    return UserError(415, what, do, where=tokenizer.path)
