"""Training: exact size, repeatable, lossless on its text; and what it says when it cannot."""

import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest

from data_tools import train_tokenizer
from data_tools.corpus import Reader
from megazero.data.tokenizer import open_tokenizer

SOURCE = Path(sysconfig.get_path("stdlib"), "argparse.py")


def train(*arguments: object) -> int:
    return train_tokenizer.main([str(argument) for argument in arguments])


def test_command(command, tmp_path: Path):
    result = command("train_tokenizer", "--input", SOURCE, "--output", "made/x.model", "--vocab", 500)
    assert result.returncode == 0 and result.stderr == ""
    assert "500 pieces" in result.stdout and "bytes per token" in result.stdout
    tokenizer = open_tokenizer(tmp_path / "made/x.model")
    assert tokenizer.vocab_size == 500 and [path.name for path in (tmp_path / "made").iterdir()] == ["x.model"]
    assert tokenizer.decode([261]) not in ("\n", "\t")
    train("--input", SOURCE, "--output", tmp_path / "again.model", "--vocab", 500)
    assert (tmp_path / "again.model").read_bytes() == tokenizer.path.read_bytes()


def test_indentation_is_one_token(model: Path):
    assert len(open_tokenizer(model).encode("        ")) == 1


def test_digits_stand_alone(model: Path):
    assert len(open_tokenizer(model).encode("1234567890" * 3)) == 30


@pytest.mark.parametrize(
    ("text", "vocab"), [("中" * 50 + "文字", 266), ("a\0b c\n" * 9, 267), ("x" * 40_000, 268), ("\u2581 \u2581a", 264)]
)
def test_odd_corpora(tmp_path: Path, text: str, vocab: int):
    """No spaces at all, NUL characters, one endless line, the mark itself: the round trip is checked by the command."""
    (tmp_path / "x.txt").write_text(text)
    assert train("--input", tmp_path / "x.txt", "--output", tmp_path / "x.model", "--vocab", vocab) == 0
    assert open_tokenizer(tmp_path / "x.model").vocab_size == vocab


def test_a_large_corpus_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 40_000)
    lines = [f'{{"text": "{i:06} {"x" * 92}"}}\n' for i in range(4000)]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    sample = train_tokenizer._sample(Reader([tmp_path / "x.jsonl"]), (tmp_path / "x.jsonl").stat().st_size)
    numbers = [int(text[:6]) for text in sample]
    assert sum(map(len, sample)) <= 41_000 and len(sample) > 300
    assert max(b - a for a, b in pairwise(numbers)) <= 12 and numbers[-1] > 3980


def test_what_it_refuses(fails, tmp_path: Path):
    (tmp_path / "small.txt").write_text("hello world this is text\n")
    (tmp_path / "blank.txt").write_text(" \n\t\n\0")
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    line = ("train_tokenizer", "--output", "x.model", "--vocab")
    assert "MZ-215: no vocabulary of 8,192 pieces from this text: Vocabulary size too high" in fails(
        1, 215, *line, 8192, "--input", "small.txt"
    )
    assert "Vocabulary size is smaller than required_chars" in fails(1, 215, *line, 10, "--input", "small.txt")
    fails(1, 214, *line, 300, "--input", "blank.txt")
    fails(1, 212, *line, 300, "--input", "bad.txt")
    fails(2, 190, *line, 0, "--input", "small.txt")
    assert list(tmp_path.glob("*.model*")) == []
