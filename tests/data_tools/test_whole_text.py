"""Ids of a document are those that the tokenizer's own library gives to the whole text, whatever holds the text."""

import gzip
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import tiktoken
import tokenizers

from data_tools import corpus, preprocess
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizer import open_tokenizer
from tests.byte_level import train
from tests.data.test_tokenizer import trained
from tests.data.test_tokenizer_kinds import END, GPT2, byte_level, ranks, with_prefix, write_ranks

Encode = Callable[[str], list[int]]
KINDS = ("ours", "unigram", "prefix", "json", "json with prefix", "ranks", "bytes")
EXACT = ("ours", "json", "ranks", "bytes")  # those whose words a cut of a document that is too long leaves alone
ENDS = ("\n", "\r\n", "\r", "\u2028", "\x85", "\n\n", "\n\n\n\n", "\t\n", " \n ", "\n  \n", "")
WORDS = ("the", "in", "  ", "    ", "self", "words.", "é", "中文", "😀", "1234567", "...", "<s>", "\0", "I'll", " ")


def made(kind: str, folder: Path, model: Path) -> tuple[Path, Encode]:
    """A tokenizer, and how its library encodes a text."""
    if kind in ("ours", "unigram", "prefix"):
        options = {"unigram": {"model_type": "unigram", "vocab_size": 278}, "prefix": {"add_dummy_prefix": True}}
        path = model if kind == "ours" else trained(folder / "x.model", **options[kind])
        return path, sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
    if kind == "bytes":
        return Path(kind), lambda text: list(text.encode())
    if kind == "ranks":
        given = {"pat_str": GPT2, "mergeable_ranks": ranks(), "special_tokens": {END: 300}}
        return write_ranks(folder / "x.tiktoken"), tiktoken.Encoding("x", **given).encode_ordinary
    library: tokenizers.Tokenizer = byte_level() if kind == "json" else with_prefix()
    if kind == "json":  # with pieces of several line ends
        train(library, ["the\n\n\n\nself\n\nin\r\n\r\nwords."] * 9, 300, [END])
    library.save(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    return folder / "tokenizer.json", lambda text: library.encode(text, add_special_tokens=False).ids


def encoded(folder: Path, tokenizer: Path, *inputs: Path) -> list[list[int]]:
    """The ids of each document, without the one that ends it."""
    line = ["--tokenizer", tokenizer, "--workers", 1, "--output", folder / "out", "--input", *inputs]
    assert preprocess.main([*map(str, line)]) == 0
    dataset, eod = IndexedDataset(folder / "out"), open_tokenizer(tokenizer).eod
    ends = dataset.offsets(0, dataset.num_documents + 1).tolist()
    found = [dataset.read(start, stop).tolist() for start, stop in pairwise(ends)]
    assert all(ids[-1] == eod for ids in found)
    return [ids[:-1] for ids in found]


def random_text(rng: random.Random, size: int) -> str:
    text = ""
    while len(text.encode()) < size:
        text += rng.choice(ENDS if rng.random() < 0.4 else WORDS)
    cut = text.encode()[:size].decode(errors="ignore")
    return cut + rng.choice(ENDS)


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_around_the_borders_of_blocks(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer, encode = made(kind, tmp_path, model)
    monkeypatch.setattr(corpus, "PIECE_BYTES", 32)
    rng = random.Random(kind)
    texts = ["one\n\ntwo", "the\r", "the\n\n\n\n\nself", "x" * 32, "x" * 33, "the in " * 20]
    texts += [random_text(rng, size) for size in (8, 30, 31, 32, 33, 34, 63, 64, 65, 96, 97, 300) for _ in range(3)]
    files = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number:02}.{('txt', 'md', 'py', 'txt.gz')[number % 4]}"
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        files.append(path)
    (tmp_path / "z.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "z.parquet")
    ids = encoded(tmp_path, tokenizer, *files, tmp_path / "z.jsonl", tmp_path / "z.parquet")
    assert ids == [encode(text) for text in texts] * 3


@pytest.mark.parametrize("kind", ["ours", "ranks", "bytes"])
def test_one_line_around_the_border_of_a_real_block(tmp_path: Path, model: Path, kind: str) -> None:
    tokenizer, encode = made(kind, tmp_path, model)
    files, texts = [], []
    for size, end in ((-1, ""), (0, ""), (1, ""), (0, "\n"), (1, "\n"), (30, "")):
        texts.append("x" * len(texts) + ("self the argument in the parser " * 9_000)[: corpus.PIECE_BYTES + size] + end)
        files.append(tmp_path / f"{len(files)}.txt")
        files[-1].write_text(texts[-1])
    assert encoded(tmp_path, tokenizer, *files) == [encode(text) for text in texts]


LONG = {
    "sentences": "Some words, and others: they're 12345 of them.  Two spaces!\n\n\n    self.x = [1]\r\n" * 40,
    "signs": "        '.x-h'   : '+/+-x_',\n" * 99,
    "one line": "Some words, and others: they're 12345 of them.  Two spaces! " * 40,
    "lines of one word": "word\n1234567\n" * 250,
    "no spaces": "中文在这里。\n中文。\n" * 250,
}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", LONG)
def test_a_document_that_is_too_long_is_cut_between_words(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    name: str,
) -> None:
    """The ids stay those of the whole text here; the report says that they may not."""
    tokenizer, encode = made(kind, tmp_path, model)
    monkeypatch.setattr(corpus, "WHOLE", 256)
    monkeypatch.setattr(preprocess, "WHOLE", 256)
    monkeypatch.setattr(corpus, "PIECE_BYTES", 100)
    (tmp_path / "x.txt").write_bytes(LONG[name].encode())
    (tmp_path / "y.txt").write_text("x" * 256)
    assert encoded(tmp_path, tokenizer, tmp_path / "x.txt", tmp_path / "y.txt") == [
        encode(LONG[name]),
        encode("x" * 256),
    ]
    said = capsys.readouterr().out
    cuts = kind in ("json", "ranks") or name == "one line"  # others are cut after newlines, which changes no id
    assert cuts == ("; 1 documents of more than 256 characters were encoded in parts" in said), said
