"""tokenizer.json, rank files and bytes: the same offer, the ids of the libraries, one line for what is wrong."""

import base64
import json
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public as published
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from megazero.base.errors import UserError
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.data.tokenizers import rank_file
from megazero.data.tokenizers.common import guarded
from megazero.launcher.signals import StoppedEarly
from tests.byte_level import byte_level_bpe

END = "<|endoftext|>"
SOURCE = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
TEXT = st.text(st.characters(codec="utf-8"))
GPT2 = rank_file.PUBLISHED["r50k_base"][0]


def byte_level(normalizer: object = None) -> tokenizers.Tokenizer:
    return byte_level_bpe([SOURCE], 400, [END], normalizer)


def ranks() -> dict[bytes, int]:
    """All bytes, and some merges of them."""
    found = {bytes([byte]): byte for byte in range(256)}
    for word in (b"th", b"the", b" the", b"in", b"  ", b"    ", b"\n\n", b"self"):
        found[word] = len(found)
    found[b"se"], found[b"lf"] = found[b"self"], len(found)
    found[b"self"] = len(found)
    return found


def write_ranks(path: Path) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks().items()]
    path.write_text("".join(lines))
    told = {"pattern": GPT2, "special_tokens": {END: 300, "<|begin|>": 301}, "eod": END, "bos": "<|begin|>"}
    path.with_name(f"{path.name}.json").write_text(json.dumps(told))
    return path


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    byte_level().save(str(folder / "tokenizer.json"))
    files = {"json": folder / "tokenizer.json", "ranks": write_ranks(folder / "some.tiktoken"), "bytes": "bytes"}
    return {name: open_tokenizer(file) for name, file in files.items()}


@given(TEXT)
@example(" " * 3000 + "\u2581 the\r\n\tself<|endoftext|>\0 e\u0301 \ufffd")
@example("")
def test_every_text_comes_back(kinds: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in kinds.values():
        ids = tokenizer.encode(text)
        assert tokenizer.lossless and tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids and all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
        assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eod]) == text


def test_ids_are_those_of_the_libraries(kinds: dict[str, Tokenizer]) -> None:
    assert kinds["json"].encode(SOURCE) == byte_level().encode(SOURCE).ids
    plain = tiktoken.Encoding("x", pat_str=GPT2, mergeable_ranks=ranks(), special_tokens={})
    assert kinds["ranks"].encode(SOURCE) == plain.encode(SOURCE)
    assert kinds["bytes"].encode("é\n") == [0xC3, 0xA9, 0x0A]


def test_sizes_and_special_ids(kinds: dict[str, Tokenizer]) -> None:
    assert (kinds["json"].vocab_size, kinds["json"].eod, kinds["json"].bos) == (400, 0, 0)
    assert (kinds["ranks"].vocab_size, kinds["ranks"].eod, kinds["ranks"].bos) == (302, 300, 301)
    assert (kinds["bytes"].vocab_size, kinds["bytes"].eod) == (257, 256)
    for tokenizer in kinds.values():
        assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,) and tokenizer.token_bytes()[tokenizer.eod] == 0
        assert tokenizer.eod in tokenizer.specials.values() and len(tokenizer.fingerprint) == 16
        with pytest.raises(UserError, match=r"MZ-212.*character 1 "):
            tokenizer.encode("a\ud800")
    assert len({tokenizer.fingerprint for tokenizer in kinds.values()}) == 3


def test_files_open_the_same_tokenizer_elsewhere(kinds: dict[str, Tokenizer], tmp_path: Path) -> None:
    for name in ("json", "ranks"):
        for file, content in kinds[name].files.items():
            (tmp_path / file).write_bytes(content)
        again = open_tokenizer(tmp_path / next(iter(kinds[name].files)))
        assert again.fingerprint == kinds[name].fingerprint and again.encode(SOURCE) == kinds[name].encode(SOURCE)


def test_fingerprint_tells_ids_of_the_same_number_apart(kinds: dict[str, Tokenizer], tmp_path: Path) -> None:
    changed = json.loads((kinds["json"].path).read_text())
    a, b = list(changed["model"]["vocab"])[300:302]
    vocab = changed["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    other = open_tokenizer(tmp_path / "tokenizer.json")
    assert other.vocab_size == kinds["json"].vocab_size and other.fingerprint != kinds["json"].fingerprint


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda: byte_level(normalizers.NFKC()), "\ufb01"),
        (lambda: byte_level(normalizers.Lowercase()), "A"),
        (lambda: with_prefix(), "\u2581a"),
    ],
    ids=["normal form", "lower case", "metaspace"],
)
def test_lossy_ones_are_taken_and_say_so(tmp_path: Path, make: Callable[[], tokenizers.Tokenizer], changes: str):
    made = make()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    assert not tokenizer.lossless
    ids = tokenizer.encode(changes)
    assert ids == made.encode(changes, add_special_tokens=False).ids
    assert tokenizer.decode(ids) != changes


def with_prefix() -> tokenizers.Tokenizer:
    """As Llama 2's: spaces as U+2581, one put before the text, bytes for what has no piece."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "b"]
    made = tokenizers.Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [("\u2581", "a")], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def test_sizes_of_byte_pieces(tmp_path: Path) -> None:
    with_prefix().save(str(tmp_path / "tokenizer.json"))
    sizes = open_tokenizer(tmp_path / "tokenizer.json").token_bytes()
    assert np.array_equal(sizes, [0] * 3 + [1] * 256 + [1, 1, 2, 1])


def test_which_token_ends_a_document(tmp_path: Path) -> None:
    made = byte_level()
    made.add_special_tokens(["</s>", "<|end|>"])
    path, beside = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    made.save(str(path))
    with pytest.raises(UserError, match=r"MZ-210.*got 2; put tokenizer_config.json"):
        open_tokenizer(path)
    beside.write_text(json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": "</s>"}))
    tokenizer = open_tokenizer(path)
    assert (tokenizer.eod, tokenizer.bos) == (401, 400)
    beside.write_text("{")
    with pytest.raises(UserError, match=r"MZ-209.*tokenizer_config.json: cannot be read"):
        open_tokenizer(path)


GOOD_JSON = byte_level().to_str()


def poisoned(change: Callable[[dict], object]) -> str:
    described = json.loads(GOOD_JSON)
    change(described)
    return json.dumps(described)


BAD_JSON = {
    "nothing": ("", "an empty file"),
    "cut off": (GOOD_JSON[:5000], "not JSON"),
    "nested": ("[" * 100_000, "not JSON"),
    "no object": ("[]", "expected a JSON object"),
    "no model": ("{}", "not a file of the tokenizers"),
    "unknown model": ('{"version": "1.0", "model": {"type": "Pickle", "vocab": {}}}', "not a file of the tokenizers"),
    "random": (poisoned(lambda d: d["model"].update(dropout=0.1)), "draws ids at random"),
    "huge id": (poisoned(lambda d: d["model"]["vocab"].update(x=2**31)), "expected 1 to 16,777,216 ids"),
    "id that is none": (poisoned(lambda d: d["model"]["vocab"].update(x="1")), "not a file of the tokenizers"),
    "merge of nothing": (
        poisoned(lambda d: d["model"]["merges"].append(["q1q", "zz"])),
        "not a file of the tokenizers",
    ),
    "bad pattern": (
        poisoned(lambda d: d.update(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""})),
        "not a file of the tokenizers",
    ),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_tokenizer_json_is_one_line(tmp_path: Path, name: str) -> None:
    content, what = BAD_JSON[name]
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"MZ-209") as caught:
        open_tokenizer(tmp_path / "tokenizer.json")
    assert what in str(caught.value) and "\n" not in str(caught.value)


BAD_RANKS = {
    "nothing": (b"", "an empty file"),
    "not base64": (b"!! 0\n", "line 1: expected a token in base64"),
    "no rank": (b"YQ==\n", "line 1: expected a token in base64"),
    "truncated": (b"YQ== 0\nYg== 1\nYw", "line 3: expected a token in base64"),
    "few bytes": (b"YQ== 0\nYg== 1\n", "none for byte 0"),
    "twice": (b"YQ== 0\nYg== 0\n", "expected for each token a different rank"),
    "negative": (b"YQ== -1\n", "expected for each token a different rank"),
    "huge": (
        b"".join(base64.b64encode(bytes([b])) + b" %d\n" % (b * 10**9) for b in range(256)),
        "expected 1 to 16,777",
    ),
}


@pytest.mark.parametrize("name", BAD_RANKS)
def test_bad_rank_file_is_one_line(tmp_path: Path, name: str) -> None:
    path = write_ranks(tmp_path / "x.tiktoken")
    content, what = BAD_RANKS[name]
    path.write_bytes(content)
    with pytest.raises(UserError, match="MZ-209") as caught:
        open_tokenizer(path)
    assert what in str(caught.value) and "\n" not in str(caught.value)


def test_rank_file_needs_what_it_does_not_say(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "x.tiktoken")
    beside = tmp_path / "x.tiktoken.json"
    told = json.loads(beside.read_text())
    for change, what in (
        ({"pattern": "("}, "not usable"),
        ({"pattern": ""}, "at most 4,096 characters"),
        ({"special_tokens": [1]}, "names with their ids"),
        ({"eod": "none"}, 'under "eod" and "bos" special tokens'),
        ({"eod": [1]}, "special tokens, got [1]"),
        ({"bos": "none"}, "special tokens, got 'none'"),
        ({"pattern": None}, 'expected under "pattern" a text'),
        ({"special_tokens": {END: 10}, "bos": END}, f"{END!r} has the id 10, which is also a rank"),
        ({"pattern": "x*"}, "its library fails: range end index"),
    ):
        beside.write_text(json.dumps(told | change))
        with pytest.raises(UserError, match="MZ-209") as caught:
            open_tokenizer(path)
        assert what in str(caught.value)
    beside.unlink()
    with pytest.raises(UserError, match=r"MZ-210.*there is no x.tiktoken.json"):
        open_tokenizer(path)
    path.rename(tmp_path / "r50k_base.tiktoken")
    assert open_tokenizer(tmp_path / "r50k_base.tiktoken").eod == 50256


@given(TEXT)
@example("\n ")
@example("I'LL we've 12345 \r\n\r\n  x\n\n y\u00a0 ...\n" + SOURCE)
def test_patterns_of_published_vocabularies_split_as_tiktokens(text: str) -> None:
    """The library's own patterns; its vocabularies are not in the package."""
    found = [c for c in published.cl100k_base.__code__.co_consts if isinstance(c, str) and r"\p{N}{1,3}" in c]
    (cl100k,) = found
    for name, theirs in (("r50k_base", published.r50k_pat_str), ("cl100k_base", cl100k)):
        assert regex.findall(rank_file.PUBLISHED[name][0], text) == regex.findall(theirs, text), name


def test_a_package_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.data.tokenizers.common.find_spec", lambda name: None)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for path, package in (
        (tmp_path / "tokenizer.json", "tokenizers"),
        (write_ranks(tmp_path / "x.tiktoken"), "tiktoken"),
    ):
        with pytest.raises(UserError, match=f"MZ-162.*the package {package}, which is not installed"):
            open_tokenizer(path)


def test_the_example_of_the_documents_is_taken(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "x.tiktoken")
    (tmp_path / "x.tiktoken.json").write_text(
        fenced("json", (Path(__file__).parents[2] / "docs/data.md").read_text())[0]
    )
    tokenizer = open_tokenizer(path)
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.lossless) == (100_257, 100_259, True)


def fenced(language: str, page: str) -> list[str]:
    """The blocks of a page in a language."""
    return [block.split("```")[0] for block in page.split(f"```{language}\n")[1:]]


def test_llama_3s_file_says_what_it_is(tmp_path: Path) -> None:
    write_ranks(tmp_path / "x.tiktoken").rename(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match=r"MZ-209.*byte pairs with their ranks; rename it to NAME.tiktoken"):
        open_tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("error", [StoppedEarly(signal.SIGTERM), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_a_guard_lets_the_end_of_a_process_through(error: BaseException):
    with pytest.raises(type(error)), guarded(Path("tokenizer.json"), "", ""):
        raise error
