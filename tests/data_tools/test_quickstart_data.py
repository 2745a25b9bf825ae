"""`make data`: complete, cheap the second time, and never old tokens beside a new tokenizer."""

import sysconfig
from pathlib import Path

import pytest

from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizer import open_tokenizer
from scripts import quickstart_data


@pytest.fixture
def few_sources(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        root / "argparse.py",
        root / "textwrap.py",
        root / "string.py",
        root / "none.py",
        root / "html/entities.py",
    ]
    monkeypatch.setattr(quickstart_data, "VOCAB", 500)
    monkeypatch.setattr(quickstart_data, "_sources", lambda: iter(sources))
    return sources[:3]


def make(folder: Path) -> set[str]:
    """Runs it; the names of the files that it wrote anew."""

    def stamps() -> set[tuple[str, int, int]]:
        return {(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*")}

    before = stamps()
    assert quickstart_data.main(["--output", str(folder)]) == 0
    return {name for name, *_ in stamps() - before}


TOKENS = {"train.bin", "train.idx", "train.json"}
EVERYTHING = {"corpus.jsonl", "recipe.txt", "tokenizer.model", *TOKENS}


def test_each_step_runs_when_needed(few_sources: list[Path], tmp_path: Path):
    folder = tmp_path / "data/quickstart"
    assert make(folder) == EVERYTHING
    dataset, tokenizer = IndexedDataset(folder / "train"), open_tokenizer(folder / "tokenizer.model")
    text = "".join(path.read_bytes().decode() for path in few_sources)
    assert dataset.num_documents == 3 and tokenizer.decode(dataset.read(0, dataset.num_tokens).tolist()) == text
    assert make(folder) == set()
    (folder / "train.bin").write_bytes(b"damaged")
    assert make(folder) == TOKENS
    (folder / "tokenizer.model").write_bytes(b"damaged")
    assert make(folder) == {"tokenizer.model", *TOKENS}
    (folder / "corpus.jsonl").unlink()
    assert make(folder) == EVERYTHING


@pytest.mark.full
def test_a_folder_of_another_recipe_is_made_again(few_sources: list[Path], tmp_path: Path):
    """As an earlier version has left it: whole, of another text, and without a word of how it was chosen."""
    make(tmp_path)
    (tmp_path / "recipe.txt").unlink()
    assert make(tmp_path) == EVERYTHING
    (tmp_path / "recipe.txt").write_text("1: everything")
    assert make(tmp_path) == EVERYTHING and make(tmp_path) == set()


def test_tables_are_no_part_of_the_corpus():
    root = Path(sysconfig.get_path("stdlib"))
    tables = [root / "html/entities.py", root / "encodings/cp037.py", root / "encodings/mac_arabic.py"]
    assert all(quickstart_data.is_table(path.read_text()) for path in tables)
    code = [root / name for name in ("argparse.py", "typing.py", "turtle.py", "encodings/utf_8.py", "opcode.py")]
    assert not any(quickstart_data.is_table(path.read_text()) for path in code)
    assert not any("pydoc_data" in path.parts for path in quickstart_data._sources())


def test_failure_of_a_step_is_the_failure_of_the_script(few_sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart_data, "VOCAB", 100)
    with pytest.raises(SystemExit) as caught:
        quickstart_data.main(["--output", str(tmp_path / "x")])
    assert caught.value.code == 1 and sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "corpus.jsonl",
        "recipe.txt",
    ]


@pytest.mark.full
def test_real_corpus(tmp_path: Path):
    """4,096 pieces reach 3.2 bytes per token on the standard library."""
    make(tmp_path)
    dataset, tokenizer = IndexedDataset(tmp_path / "train"), open_tokenizer(tmp_path / "tokenizer.model")
    assert tokenizer.vocab_size == 4096 and dataset.num_documents > 400
    assert tokenizer.token_bytes()[dataset.read(0, dataset.num_tokens)].mean() > 3.2
