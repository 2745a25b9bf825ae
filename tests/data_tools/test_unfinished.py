"""A command that ends anywhere goes on where it was, and gives the same bytes; parts, merged, are the whole."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_tools import merge, preprocess
from data_tools.counts import Counts
from data_tools.encoding import Encoder
from data_tools.unfinished import Unfinished
from megazero.data.origin import read_origin
from tests.byte_level import byte_level_bpe

NAMES = (".bin", ".idx", ".json", ".mask", ".skipped.txt")
TEMPLATE = "{% for message in messages %}{{ message.content }}<eod>{% endfor %}"
CHAT = ("--chat", "TEMPLATE.jinja")


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """The words of a command line: documents of every kind, some of them bad, some twice, some left out."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [f"document {i % 7}\n" * (i % 4) for i in range(20)]
    turns = [
        [{"role": "user", "content": "?"}, {"role": ("user", "assistant")[i % 3 > 0], "content": text}]
        for i, text in enumerate(texts)
    ]
    lines = [json.dumps({"text": text, "n": i, "messages": turns[i]}) for i, text in enumerate(texts)]
    lines[5:5] = ["{", "", '{"text": 1, "n": 2}']
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("a text of its own")
    (folder / "c.txt").write_bytes(b"\xff")
    (folder / "d.jsonl").write_text("\n".join(lines[8:12]) + "\n{")
    return ["--input", str(folder), "--tokenizer", "bytes", "--skip-bad", "--workers", "1"]


def made(prefix: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name in NAMES if (path := Path(f"{prefix}{name}")).exists()}


def with_template(folder: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command line, with a template where one is named."""
    (folder / "TEMPLATE.jinja").write_text(TEMPLATE)
    return tuple(str(folder / word) if word.endswith(".jinja") else word for word in words)


class Killed(BaseException):
    """In place of a signal that ends a process at once."""


def after(pieces: int) -> object:
    """`Encoder.encode` that dies after some pieces of all parts."""
    encode, left = Encoder.encode, iter(range(pieces))

    def until(encoder: Encoder, given: Iterator[object]) -> Iterator[object]:
        for found in encode(encoder, given):  # type: ignore[arg-type]
            if next(left, None) is None:
                raise Killed
            yield found

    return until


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "PART_BYTES", 300)


@pytest.mark.parametrize(
    "more",
    [
        ("--deduplicate",),
        CHAT,
        *(pytest.param(words, marks=pytest.mark.full) for words in ((), ("--part", "1/2"))),
    ],
)
def test_the_same_line_goes_on_and_gives_the_same_bytes(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None, more: tuple[str, ...], capsys
) -> None:
    """Killed after every few pieces, over all parts."""
    whole, out, more = tmp_path / "whole", tmp_path / "out", with_template(tmp_path, more)
    assert preprocess.main([*text, *more, "--output", str(whole)]) == 0
    expected, went_on = made(whole), 0
    assert len(expected) == 4 + ("--chat" in more)
    for pieces in range(0, 100, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "encode", after(pieces))
            try:
                preprocess.main([*text, *more, "--output", str(out)])
                break  # there are no more
            except Killed:
                assert not made(out)
        if (tmp_path / "out.unfinished").exists():  # a killed command leaves a part that it has begun
            (tmp_path / "out.unfinished/000099.bin.tmp-0").write_bytes(b"x")
        capsys.readouterr()
        assert preprocess.main([*text, *more, "--output", str(out)]) == 0
        went_on += "resuming after" in capsys.readouterr().err
        assert {n: c.replace(b"out", b"whole") for n, c in made(out).items()} == expected
        assert not (tmp_path / "out.unfinished").exists()
        for name in NAMES:
            Path(f"{out}{name}").unlink(missing_ok=True)
    assert went_on >= 2


@pytest.mark.parametrize("more", [(), ("--deduplicate",), CHAT], ids=["text", "duplicates", "chat"])
def test_parts_do_not_matter(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    text, found = [*text, *with_template(tmp_path, more)], []
    for size in (100, 700, 10**6):
        monkeypatch.setattr(preprocess, "PART_BYTES", size)
        assert preprocess.main([*text, "--output", str(tmp_path / "out")]) == 0
        found.append({name: content for name, content in made(tmp_path / "out").items() if name != ".skipped.txt"})
    assert found[0] == found[1] == found[2]


def test_another_line_begins_anew(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None, capsys
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", after(16))
        with pytest.raises(Killed):
            preprocess.main([*text, "--output", str(out)])
    assert list((tmp_path / "out.unfinished").glob("*.done"))
    assert preprocess.main([*text, "--deduplicate", "--output", str(out)]) == 0
    assert "resuming" not in capsys.readouterr().err
    found = made(out)
    assert preprocess.main([*text, "--deduplicate", "--output", str(out)]) == 0
    assert made(out) == found


def test_one_command_at_a_time(text: list[str], tmp_path: Path, capsys) -> None:
    with Unfinished(tmp_path / "out", "job"):
        assert preprocess.main([*text, "--output", str(tmp_path / "out")]) == 1
    assert "MZ-208" in (said := capsys.readouterr().err) and "is being written by another command" in said


@pytest.mark.parametrize("more", [(), CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("of", [5, pytest.param(2, marks=pytest.mark.full)])
def test_parts_that_are_merged_are_the_whole(text: list[str], tmp_path: Path, of: int, more: tuple[str, ...]) -> None:
    text = [*text, *with_template(tmp_path, more)]
    assert preprocess.main([*text, "--output", str(tmp_path / "whole")]) == 0
    parts = []
    for number in range(1, of + 1):
        part = tmp_path / f"part{number}"
        code = preprocess.main([*text, "--part", f"{number}/{of}", "--output", str(part)])
        if code == 0:
            parts.append(str(part))
    assert len(parts) > 1
    assert merge.main([*parts, "--output", str(tmp_path / "merged")]) == 0
    for name in (".bin", ".idx", ".json", *((".mask",) if more else ())):
        assert Path(f"{tmp_path}/merged{name}").read_bytes() == Path(f"{tmp_path}/whole{name}").read_bytes()


def test_duplicates_are_left_out_once(text: list[str], tmp_path: Path, capsys) -> None:
    assert preprocess.main([*text, "--deduplicate", "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    origin = read_origin(tmp_path / "out")
    assert origin is not None
    texts = {f"document {i % 7}\n" * (i % 4) for i in range(20)} - {""} | {"a text of its own"}
    assert origin.documents == len(texts) and origin.text_bytes == sum(map(len, texts))
    assert origin.longest == max(map(len, texts)) + 1 and f"longest {origin.longest} tokens" in said
    assert "duplicates" in said and "4 skipped as bad" in said
    refused = preprocess.main([*text, "--deduplicate", "--part", "1/2", "--output", str(tmp_path / "x")])
    assert refused == 2 and "MZ-190" in capsys.readouterr().err


def test_documents_of_other_tokenizers_are_encoded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Where a cut after a line end may change ids, a document is cut only where it is longer than a piece may be."""
    document = "x = 1\n\n\n    y = 2\n\n\n" * 10
    made = byte_level_bpe([document], 280, ["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text(document)
    line = ["--input", str(tmp_path / "x.txt"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--workers", "1"]
    monkeypatch.setattr("data_tools.corpus.PIECE_BYTES", 7)
    assert preprocess.main([*line, "--output", str(tmp_path / "whole")]) == 0
    assert "encoded in parts" not in capsys.readouterr().out
    origin = read_origin(tmp_path / "whole")
    assert origin is not None and origin.tokens == len(made.encode(document).ids) + 1
    monkeypatch.setattr("data_tools.corpus.WHOLE", 7)
    assert preprocess.main([*line, "--output", str(tmp_path / "cut")]) == 0
    assert "; 1 documents of more than" in capsys.readouterr().out


def test_counts_of_many_documents_are_added_in_place() -> None:
    total, each = Counts(digests=["0" * 32]), Counts(documents=1, digests=["1" * 32], longest=3)
    kept = total.digests
    for _ in range(3):
        total.add(each)
    assert (total.documents, total.longest, len(total.digests)) == (3, 3, 4) and total.digests is kept


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its lock ends with the process
def test_a_cleaning_that_is_cut_off_leaves_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), Unfinished(output, "one") as unfinished:
        unfinished.finish(Counts(documents=1))
        raise KeyboardInterrupt
    folder, honest = tmp_path / "out.unfinished", Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".done":
            raise KeyboardInterrupt
        honest(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt), Unfinished(output, "another"):
        pass
    monkeypatch.undo()
    assert (folder / "000000.done").exists()
    with Unfinished(output, "one") as again:
        assert again.done == []
