"""What token files were made of: written and read, held against the files and the tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.data.origin import Origin, joined, origin_of, path_of, read_origin, require_tokenizer
from megazero.data.tokenizer import Tokenizer, open_tokenizer

ORIGIN = Origin("00", 400, 3, 100, text_bytes=330, id_bytes=300, longest=60)


def test_it_comes_back(tmp_path: Path) -> None:
    prefix = tmp_path / "web-v1.5"
    assert read_origin(prefix) is None
    ORIGIN.write(prefix)
    assert read_origin(prefix) == ORIGIN and path_of(prefix).name == "web-v1.5.json"
    assert ORIGIN.bytes_scale == 1.1 and replace(ORIGIN, id_bytes=0).bytes_scale == 1.0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tokenizer": 1}', "\xff", "NaN"])
def test_damage_is_one_line(tmp_path: Path, text: str) -> None:
    path_of(tmp_path / "x").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"MZ-203 .*x.json: cannot be read"):
        read_origin(tmp_path / "x")


def test_counts_that_are_none(tmp_path: Path) -> None:
    ORIGIN.write(tmp_path / "x")
    path = path_of(tmp_path / "x")
    path.write_text(path.read_text().replace('"tokens": 100', '"tokens": -1'))
    with pytest.raises(UserError, match=r"MZ-203.*tokens: Input should be greater than or equal to 0"):
        read_origin(tmp_path / "x")


def test_of_other_files(make_dataset, tmp_path: Path) -> None:
    dataset = make_dataset([[1, 2], [3]], name="x")
    assert origin_of(dataset) is None
    mine = replace(ORIGIN, documents=2, tokens=3)
    mine.write(tmp_path / "x")
    assert origin_of(dataset) == mine
    ORIGIN.write(tmp_path / "x")
    with pytest.raises(UserError, match=r"MZ-203.*3 documents and 100 tokens, .*x.idx has 2 and 3"):
        origin_of(dataset)


def test_of_another_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    assert require_tokenizer(prefix, tokenizer) is None
    mine = replace(ORIGIN, tokenizer=tokenizer.fingerprint)
    mine.write(prefix)
    assert require_tokenizer(prefix, tokenizer) == mine == require_tokenizer(prefix, None)
    with pytest.raises(UserError, match=r"MZ-221 .*x.bin: was made by the tokenizer .*400 ids.*not by bytes"):
        require_tokenizer(prefix, open_tokenizer("bytes"))


def test_joined(tmp_path: Path) -> None:
    other = replace(ORIGIN, documents=5, tokens=7, text_bytes=11, id_bytes=13, longest=4)
    assert joined([ORIGIN, other], tmp_path) == replace(
        ORIGIN, documents=8, tokens=107, text_bytes=341, id_bytes=313, longest=60
    )
    assert joined([ORIGIN, None], tmp_path) is None
    with pytest.raises(UserError, match=r"MZ-217.*made by the tokenizer 00, another input by 01"):
        joined([ORIGIN, None, replace(ORIGIN, tokenizer="01")], tmp_path)
