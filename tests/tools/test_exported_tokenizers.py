"""What `AutoTokenizer` reads of an export gives the ids of the run's tokenizer, or the export is refused."""

import base64
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from megazero.__main__ import main
from megazero.config.file import load
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.run.folder import RunFolder
from tests.byte_level import byte_level_bpe
from tests.tiny_run import TinyData
from tests.tools.test_convert import gpt2, llama, refused, with_tokenizer

VOCAB = 1400
TEXT = Path(__file__).read_text() + Path(__file__).parents[1].joinpath("tiny_run.py").read_text()
SHAPES: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama}
# Spaces, line ends, controls, SentencePiece's mark, normal forms, emoji, and names that mean something to somebody.
ODD = [*" \n\t\r\x00\x01\x1f\x7f\x85\u2581\u00a0\u3000\u200b\ufeff\u00e9\ufb01\ud7ff\U0010ffff\U0001f600"]
ODD += [
    "e\u0301",
    "\U0001f469\u200d\U0001f467",
    "<0x41>",
    "\u4e2d\u6587",
    "@@",
    "[PAD]",
    "##a",
    "\u0120",
    "\n\n",
    "    ",
]
ODD += ["aaa", "abab", "-----", "'ll", "123456", "0"]


def lines(count: int, seed: int) -> Iterator[str]:
    """Text, odd signs, any characters, runs of a few."""
    draw = random.Random(seed)
    for kind in range(count):
        length = draw.randrange(1, 60)
        if kind % 4 == 0:
            start = draw.randrange(len(TEXT))
            yield TEXT[start : start + length]
        elif kind % 4 == 1:
            yield "".join(draw.choices(ODD, k=length // 2))
        elif kind % 4 == 2:
            ends = draw.choices([0x80, 0x3000, 0xD800, 0x110000], k=length)
            points = (draw.randrange(end) for end in ends)
            yield "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        else:
            yield "".join(draw.choices("ab =-\n1", k=length))


def trained(folder: Path, name: str, **options: Any) -> Path:
    """A SentencePiece model."""
    told = {"model_type": "bpe", "vocab_size": 900, "hard_vocab_limit": False, "minloglevel": 2} | options
    text = iter([line for line in TEXT.splitlines() if line])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=text, model_prefix=str(folder / name), **told)
    return folder / f"{name}.model"


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
PREFIX_FREE = IDENTITY | {"add_dummy_prefix": False}
SENTENCE_PIECE: dict[str, dict[str, Any]] = {
    "llama-2": IDENTITY | {"split_digits": True, "allow_whitespace_only_pieces": True},
    "gemma": PREFIX_FREE | {"user_defined_symbols": ["@@", "\n\n", "[PAD]"], "pad_id": 3},
    "no-begin": PREFIX_FREE | {"bos_id": -1},
    "collapses": IDENTITY | {"remove_extra_whitespaces": True},
    "characters": {"model_type": "char", "vocab_size": 200, "normalization_rule_name": "identity"},
}


def bpe(vocab: int = 600) -> tokenizers.Tokenizer:
    return byte_level_bpe([TEXT], vocab)


def json_file(folder: Path) -> Path:
    """With a token before each text, which is put there by transformers alone, and what a chat needs."""
    made = bpe()
    made.add_special_tokens(["<|begin|>", "<|end|>", "<|pad|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", made.token_to_id("<|begin|>"))]
    )
    made.save(str(folder / "tokenizer.json"))
    told = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    told |= {"model_max_length": 77, "padding_side": "left", "mask_token": "<|not there|>", "tokenizer_class": "Other"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder / "tokenizer.json"


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {  # of cl100k_base as tiktoken has it today, and of o200k_base
    "possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
    r"\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def rank_file(folder: Path, pattern: str) -> Path:
    """With a gap between its ranks and its special tokens."""
    level, path = bpe().get_vocab(), folder / "NAME.tiktoken"
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    pictures = {chr(byte): byte for byte in shown}
    pictures |= {chr(256 + n): byte for n, byte in enumerate(b for b in range(256) if b not in shown)}
    rows = ((base64.b64encode(bytes(map(pictures.__getitem__, token))), rank) for token, rank in level.items())
    path.write_bytes(b"".join(b"%b %d\n" % row for row in sorted(rows, key=lambda row: row[1])))
    told = {"pattern": PATTERNS[pattern], "special_tokens": {"<|end|>": 700, "<|begin|>": 705}}
    folder.joinpath("NAME.tiktoken.json").write_text(json.dumps(told | {"eod": "<|end|>", "bos": "<|begin|>"}))
    return path


KINDS = ["bytes", "ours", *SENTENCE_PIECE, "json", *PATTERNS]


@pytest.fixture(scope="module")
def made(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    folder, found = tmp_path_factory.mktemp("tokenizers"), dict[str, Tokenizer]()

    def make(kind: str) -> Path | str:
        if kind in ("bytes", "ours"):
            return "bytes" if kind == "bytes" else tiny_data.tokenizer
        if kind in SENTENCE_PIECE:
            return trained(folder, kind, **SENTENCE_PIECE[kind])
        (folder / kind).mkdir()
        return json_file(folder / kind) if kind == "json" else rank_file(folder / kind, kind)

    def find(kind: str) -> Tokenizer:
        if kind not in found:
            found[kind] = open_tokenizer(make(kind))
        return found[kind]

    return find


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untrained run of each shape."""
    folder = tmp_path_factory.mktemp("runs")
    for shape, model in SHAPES.items():
        model(vocab_size=VOCAB).save_pretrained(folder / "theirs")
        line = ["import", "--from", "hf", "--model", str(folder / "theirs"), "--out", str(folder / shape)]
        assert main(line) == 0
        shutil.rmtree(folder / "theirs")
    return {shape: folder / shape for shape in SHAPES}


def exported(run: Path, tokenizer: Tokenizer | Path, folder: Path) -> Path:
    path = tokenizer if isinstance(tokenizer, Path) else tokenizer.path
    with_tokenizer(RunFolder(shutil.copytree(run, folder / "run")), path)
    assert main(["export", "--to", "hf", "--run", str(folder / "run"), "--out", str(folder / "out")]) == 0
    return folder / "out"


def examine(run: Path, kind: str, mine: Tokenizer, folder: Path, texts: Iterator[str]) -> None:
    out = exported(run, mine, folder)
    read = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    named = [name for name in mine.specials if not name.isspace()]  # which are tokens in transformers' texts
    for text in texts:
        if any(name in text for name in named):
            continue
        ids = mine.encode(text)
        assert read.encode(text, add_special_tokens=False) == ids, repr(text)
        unknown = not mine.lossless and "\u2047" in mine.decode(ids)
        if ids and not unknown:  # SentencePiece's sign for what it has no id for
            assert read.decode(ids) == mine.decode(ids), repr(text)
    pad = {"gemma": 3, "json": mine.vocab_size - 1}.get(kind)
    for part in (read, transformers.AutoConfig.from_pretrained(out, local_files_only=True)):
        assert (part.bos_token_id, part.eos_token_id, part.pad_token_id) == (mine.bos, mine.eod, pad)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_our_ids(runs, made, tmp_path: Path, kind: str, shape: str, capsys) -> None:
    examine(runs[shape], kind, made(kind), tmp_path, lines(80, seed=KINDS.index(kind)))


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_our_ids_of_10_000_lines(runs, made, tmp_path: Path, kind: str, shape: str, capsys) -> None:
    examine(runs[shape], kind, made(kind), tmp_path, lines(10_000, seed=100 + KINDS.index(kind)))


def test_what_a_folder_says_of_its_tokenizer_stays(runs, made, tmp_path: Path, capsys) -> None:
    """But no token that the tokenizer does not have: it would get an id outside of the model."""
    out = exported(runs["llama"], made("json"), tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert (read.model_max_length, read.padding_side, read.mask_token) == (77, "left", None)
    assert read.pad_token == "<|pad|>" and len(read) == made("json").vocab_size
    assert read.encode("a") == [made("json").bos, *made("json").encode("a")]  # as its own file says


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"model_type": "unigram"}, "only SentencePiece models of byte pairs or characters can be exported"),
        ({"model_type": "word"}, "only SentencePiece models of byte pairs or characters can be exported"),
        ({"normalization_rule_name": "nmt_nfkc"}, "its normalization rules rewrite characters"),
        ({"treat_whitespace_as_suffix": True}, " became "),
        ({"user_defined_symbols": ["@@", "<x>"]}, " became "),
    ],
)
def test_a_tokenizer_that_would_give_other_ids_is_refused(runs, tmp_path: Path, options, what: str, capsys) -> None:
    """A symbol of the user's is the beginning of a text there, and gets another space in front of it."""
    other = trained(tmp_path, "other", **(IDENTITY | options))
    with_tokenizer(RunFolder(shutil.copytree(runs["gpt2"], tmp_path / "run")), other)
    said = refused(capsys, 415, "export", "--to", "hf", "--run", tmp_path / "run", "--out", tmp_path / "out")
    assert f"{other}: no tokenizer.json gives the ids of this tokenizer" in said and what in said
    assert "remove data.tokenizer from config.yaml to export only weights" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["bytes", "ours", "possessive", "json"])
def test_an_export_comes_in_again_with_the_same_tokenizer(runs, made, tmp_path: Path, kind: str, capsys) -> None:
    """Its token files are of that fingerprint. A tokenizer.json that was changed since is another tokenizer."""
    out, mine = exported(runs["gpt2"], made(kind), tmp_path), made(kind)
    line = ["import", "--from", "hf", "--model", str(out), "--out"]
    assert main([*line, str(tmp_path / "again")]) == 0
    named = load(str(tmp_path / "again/config.yaml")).data.tokenizer
    assert named is not None and open_tokenizer(named).fingerprint == mine.fingerprint
    changed = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    changed.add_tokens(["one more"])
    changed.save(str(out / "tokenizer.json"))
    assert main([*line, str(tmp_path / "other")]) == 0
    named = load(str(tmp_path / "other/config.yaml")).data.tokenizer
    assert named == str(tmp_path / "other/tokenizer.json")
    assert len(open_tokenizer(tmp_path / "other/tokenizer.json").encode("one more")) == 1
