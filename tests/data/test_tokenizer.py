"""Encoding loses nothing; token_bytes adds up; unusable models are refused."""

import io
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from megazero.base.errors import UserError
from megazero.data.tokenizer import Tokenizer, open_tokenizer

TEXT = st.text(st.characters(codec="utf-8"))
HARD = st.lists(st.sampled_from(["\u2581", " ", "  ", "\n", "\r\n", "\t", "\0", "\ufeff", "a", "é", "😀", "</s>"]))


def assert_lossless(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids and all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@given(TEXT | HARD.map("".join))
@example("\u2581")
@example("a\u2581\u2581 b\u2581")
@example(" " * 10_000 + "x")
@example("<0x41><s></s><unk>")
@example("\ufffd\uffff\U0010ffff")
def test_every_text_comes_back(tokenizer: Tokenizer, text: str):
    assert_lossless(tokenizer, text)


def test_sources_of_the_standard_library_come_back(tokenizer: Tokenizer):
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::8]
    assert len(paths) > 10
    for path in paths:
        assert_lossless(tokenizer, path.read_bytes().decode())


def test_ids(tokenizer: Tokenizer):
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 2)
    assert tokenizer.encode("\n\t") == [3, 4] and tokenizer.encode("") == [] and tokenizer.decode([2]) == ""
    sizes = tokenizer.token_bytes()
    assert sizes.shape == (400,) and sizes[:5].tolist() == [0, 0, 0, 1, 1] and set(sizes[5:261]) == {1}


def test_concatenation_at_line_ends(tokenizer: Tokenizer):
    """What lets preprocessing cut a file after any newline."""
    a, b = "def f(x):\n", "    return x\n"
    assert tokenizer.encode(a) + tokenizer.encode(b) == tokenizer.encode(a + b)


def test_half_a_surrogate_pair_is_no_text(tokenizer: Tokenizer):
    with pytest.raises(UserError, match=r"MZ-212.*character 1 "):
        tokenizer.encode("a\ud800")


def test_fingerprint_is_of_the_content(tokenizer: Tokenizer, tmp_path: Path):
    copy = tmp_path / "copy.model"
    copy.write_bytes(tokenizer.path.read_bytes())
    assert open_tokenizer(copy).fingerprint == tokenizer.fingerprint and len(tokenizer.fingerprint) == 16


def test_files_that_are_no_model(tmp_path: Path):
    with pytest.raises(UserError, match=r"MZ-209.*No such file.*`megazero tokenizer "):
        open_tokenizer(tmp_path / "none.model")
    with pytest.raises(UserError, match=r"MZ-209.*make data"):
        open_tokenizer(tmp_path / "data/quickstart/tokenizer.model")
    for content in (b"\x00" * 100, b"not a model"):
        (tmp_path / "x.model").write_bytes(content)
        with pytest.raises(UserError, match=r"MZ-209.*cannot parse"):
            open_tokenizer(tmp_path / "x.model")


CHANGES = [
    {"byte_fallback": False},
    {"add_dummy_prefix": True},
    {"remove_extra_whitespaces": True},
    {"normalization_rule_name": "nmt_nfkc"},
]
FAITHFUL: dict[str, object] = {
    "byte_fallback": True,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}


def trained(path: Path, **options: object) -> Path:
    """A model of two sentences, with other settings than ours."""
    model = io.BytesIO()
    settings: dict[str, object] = {"model_type": "bpe", "vocab_size": 285, "minloglevel": 2, **FAITHFUL, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to learn from", "and some more of the same", "of of of of of"]),
        model_writer=model,
        **settings,
    )
    path.write_bytes(model.getvalue())
    return path


def test_rules_that_rewrite_rare_text_make_a_model_lossy(tmp_path: Path):
    """No example need show it: the model's file has rules."""
    (tmp_path / "rules.tsv").write_text("71 2E\t77\n")  # "q." -> "w"
    path = trained(tmp_path / "x.model", normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    tokenizer = open_tokenizer(path)
    assert not tokenizer.lossless
    assert tokenizer.encode("q.") == sentencepiece.SentencePieceProcessor(model_file=str(path)).encode("q.")


@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_models_that_change_text_are_taken_and_say_so(tmp_path: Path, options: dict[str, object]):
    more = {"vocab_size": 25} if options == {"byte_fallback": False} else {}
    path = trained(tmp_path / "x.model", **options, **more)
    tokenizer, model = open_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert not tokenizer.lossless and not tokenizer.cuts_after_newline
    for text in ("some words", "  of \u2581 the\nsame ", ""):
        assert tokenizer.encode(text) == model.encode(text) and tokenizer.decode(model.encode(text)) == model.decode(
            model.encode(text)
        )


@pytest.mark.parametrize("options", [{"eos_id": -1}], ids=str)
def test_models_without_an_end_of_document_are_refused(tmp_path: Path, options: dict[str, object]):
    with pytest.raises(UserError, match=r"MZ-210.*which ends a document"):
        open_tokenizer(trained(tmp_path / "x.model", **options))


def plainly(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids that the library gives for a text as a whole."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.path))
    mark = [model.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
    first, *others = text.split("\u2581")
    return sum(((mark + model.encode(part)) for part in others), model.encode(first))


@given(TEXT | HARD.map("".join))
@example(" a  b\n  c\t d \n\n\te" * 3)
def test_words_that_are_remembered_have_the_ids_of_the_whole(tokenizer: Tokenizer, text: str):
    """Each text is encoded twice: word by word as they are met first, and from memory."""
    assert tokenizer.cuts_after_newline
    assert tokenizer.encode(text) == tokenizer.encode(text) == plainly(tokenizer, text)


def test_words_of_sources_have_the_ids_of_the_whole(tokenizer: Tokenizer):
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::16]:
        text = path.read_bytes().decode()
        assert tokenizer.encode(text) == plainly(tokenizer, text)


@pytest.mark.parametrize(
    "options",
    [{"model_type": "unigram", "vocab_size": 278}, {"split_by_whitespace": False, "vocab_size": 300}],
    ids=str,
)
def test_no_words_are_remembered_where_pieces_reach_over_them(tmp_path: Path, options: dict[str, object]):
    tokenizer = open_tokenizer(trained(tmp_path / "x.model", **options))
    assert not tokenizer.cuts_after_newline
    for text in ("some words to learn", "of  the same \n some more"):
        assert tokenizer.encode(text) == plainly(tokenizer, text)
