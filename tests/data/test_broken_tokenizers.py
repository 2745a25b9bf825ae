"""Broken files of tokenizers: each opens, or is refused in one line, whatever a library does with it."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.base.errors import UserError
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from tests.data.test_tokenizer import trained
from tests.data.test_tokenizer_kinds import END, GPT2, byte_level, write_ranks

SLOW = "(?:a|a)*b(?<=x)"  # backtracks until its library gives up, which is a Rust panic
PROBE = "a" * 60 + "b the  self\n\n"
JUNK = ([], {}, None, -1, 2**40, 0, 5, "", "a", "\ud800", 1.5, True, [[]], {"type": "BPE"}, "(", SLOW, "x*", END)
COUNT = 60  # mutations of a kind


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(len(data))
        how = rng.randrange(5)
        if how == 0:
            data[at] = rng.randrange(256)
        elif how == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif how == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif rng.random() < 0.2:
            del data[at:]
        data = data or bytearray(b"x")
    return bytes(data)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container and key inside a JSON value; of long containers a few."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    found = [(value, key) for key in keys[:12]]
    for key in keys[:12]:
        found += places(value[key])
    return found


def changed_json(content: bytes, rng: random.Random) -> bytes:
    value = copy.deepcopy(json.loads(content))
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(places(value))
        if rng.random() < 0.3:
            del container[key]
        else:
            container[key] = rng.choice(JUNK)
        if not value:
            break
    return json.dumps(value).encode()


def write_json(folder: Path) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}, "bos_token": END}))
    return folder / "tokenizer.json"


# How a tokenizer is made, which of its files is changed, and how.
Change = Callable[[bytes, random.Random], bytes]
KINDS: dict[str, tuple[Callable[[Path], Path], str, Change]] = {
    "model": (lambda folder: trained(folder / "x.model"), "x.model", changed_bytes),
    "json bytes": (write_json, "tokenizer.json", changed_bytes),
    "json values": (write_json, "tokenizer.json", changed_json),
    "config bytes": (write_json, "tokenizer_config.json", changed_bytes),
    "config values": (write_json, "tokenizer_config.json", changed_json),
    "ranks": (lambda folder: write_ranks(folder / "x.tiktoken"), "x.tiktoken", changed_bytes),
    "ranks' pattern bytes": (lambda folder: write_ranks(folder / "x.tiktoken"), "x.tiktoken.json", changed_bytes),
    "ranks' pattern values": (lambda folder: write_ranks(folder / "x.tiktoken"), "x.tiktoken.json", changed_json),
}


def use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROBE)
    tokenizer.decode(ids)
    tokenizer.decode([*range(min(tokenizer.vocab_size, 500))])


@pytest.mark.parametrize("kind", KINDS)
def test_each_mutation_opens_or_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    make, name, change = KINDS[kind]
    path, rng, refused = make(tmp_path), random.Random(kind), 0
    good = (tmp_path / name).read_bytes()
    use(open_tokenizer(path))
    for _ in range(COUNT):
        (tmp_path / name).write_bytes(change(good, rng))
        capfd.readouterr()
        try:
            tokenizer = open_tokenizer(path)
        except UserError as error:
            assert error.code in (209, 210) and "\n" not in str(error)
            refused += 1
            continue
        finally:
            assert capfd.readouterr().err == "", "of a library that panics"
        try:
            use(tokenizer)
        except UserError as error:
            assert error.code == 209
    assert refused, "no mutation has done harm"


def test_control_pieces_that_are_no_text(tmp_path: Path) -> None:
    path = trained(tmp_path / "x.model")
    path.write_bytes(path.read_bytes().replace(b"\n\x03<s>", b"\n\x03\xff\xfe>"))
    with pytest.raises(UserError, match=r"MZ-209 .*x.model: expected a SentencePiece model, cannot parse it: .*utf-8"):
        open_tokenizer(path)


def test_a_text_over_which_the_library_panics(tmp_path: Path) -> None:
    """The pattern is good enough for what a tokenizer is asked when it is opened."""
    ranks = write_ranks(tmp_path / "x.tiktoken")
    beside = tmp_path / "x.tiktoken.json"
    beside.write_text(json.dumps(json.loads(beside.read_text()) | {"pattern": f"{SLOW}|{GPT2}"}))
    described = json.loads(byte_level().to_str())
    split = {"type": "Split", "pattern": {"Regex": SLOW}, "behavior": "Isolated", "invert": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, described["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    for path, said in ((ranks, "BacktrackLimitExceeded"), (tmp_path / "tokenizer.json", "retry-limit-in-match over")):
        tokenizer = open_tokenizer(path)
        assert tokenizer.lossless
        with pytest.raises(
            UserError, match=f"MZ-209 .*: its library fails: .*{said}.*; repair the tokenizer, or leave"
        ):
            tokenizer.encode(PROBE)


@pytest.mark.parametrize("end", ["a", "\u010a", "\u00c3"], ids=["a", "newline", "half a character"])
def test_an_end_of_documents_that_is_a_bytes_id(tmp_path: Path, end: str) -> None:
    path = write_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    with pytest.raises(
        UserError, match=r"MZ-209 .*ends a document, but text can encode to it as well; name a special token"
    ):
        open_tokenizer(path)


def test_an_end_of_documents_without_a_list_of_special_tokens(tmp_path: Path) -> None:
    """It stands in the vocabulary alone, and no text gives it."""
    path = write_json(tmp_path)
    described = json.loads(path.read_text())
    path.write_text(json.dumps(described | {"added_tokens": []}))
    tokenizer = open_tokenizer(path)
    assert tokenizer.eod == described["model"]["vocab"][END] and tokenizer.eod not in tokenizer.encode(END)
