"""Samples: the same call gives the same text, from the run's own config, weights and tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.__main__ import main
from megazero.base.errors import UserError
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.data.tokenizer import open_tokenizer
from megazero.generation.decode import Decoder
from megazero.generation.prompts import read_prompts, texts_in
from megazero.generation.sampling import Sampling
from megazero.model.batch_context import BatchContext
from megazero.model.transformer import Transformer
from megazero.run.folder import RunFolder
from megazero.tools.generate import Request
from megazero.tools.generate import generate as generate_all
from tests.tiny_run import VOCAB, command


@pytest.fixture(scope="module")
def model(finished: RunFolder) -> Transformer:
    return megazero.load(finished.path, torch.float32).model


@pytest.fixture
def copy(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A finished run that may be damaged."""
    return RunFolder(shutil.copytree(finished.path, tmp_path / "copy"))


def generate(folder: RunFolder, prompt: str, sampling: Sampling, **how: Any) -> str:
    """The text of one prompt."""
    said = list[dict[str, Any]]()
    assert generate_all(Request(folder.path, prompt, None, None, sampling, **how), said.append) == 0
    assert said[0]["prompt"] == prompt
    return said[0]["text"]


def draw(model: Transformer, ids: list[int], sampling: Sampling, vocab: int = VOCAB, stop: int = -1) -> list[int]:
    return Decoder(model).continued([ids], sampling, vocab=vocab, stops={stop})[0]


def test_same_seed_same_text(finished: RunFolder):
    texts = [generate(finished, "def ", Sampling(tokens=20, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and all(text.startswith("def ") for text in texts)


def test_torchs_own_generator_is_left_alone(finished: RunFolder):
    before = torch.get_rng_state()
    generate(finished, "def ", Sampling(tokens=3))
    assert torch.equal(before, torch.get_rng_state())


def test_temperature_zero_takes_the_likeliest(model: Transformer):
    ids = [5, 6, 7]
    greedy = draw(model, ids, Sampling(tokens=6, temperature=0, seed=1))
    context = list(ids)
    for token in greedy:
        logits_SBV = model(
            torch.tensor(context)[:, None], BatchContext(0, torch.zeros(1, dtype=torch.int64), training=False)
        )
        assert token == int(logits_SBV[-1, 0].argmax())
        context.append(token)
    assert greedy == draw(model, ids, Sampling(tokens=6, temperature=0.8, top_k=1))
    assert greedy == draw(model, ids, Sampling(tokens=6, temperature=1e-300))


def test_only_ids_of_the_tokenizer_are_drawn(model: Transformer):
    """A model may have more rows than the tokenizer has pieces; there is no text for those."""
    assert max(draw(model, [5], Sampling(tokens=40, temperature=50.0, top_k=VOCAB), vocab=20)) < 20


def test_prompts_of_any_length(finished: RunFolder, model: Transformer):
    assert isinstance(generate(finished, "", Sampling(tokens=3)), str)
    with pytest.raises(
        UserError,
        match=r"MZ-112 prompt 1: expected at most 31 ids, as positions are learned, got",
    ):
        generate(finished, "x = 1  # é 中\n" * 40, Sampling(tokens=3))


def test_stops_before_the_end_of_a_document(model: Transformer):
    new = draw(model, [5], Sampling(tokens=30))
    stop = new[10]
    assert draw(model, [5], Sampling(tokens=30), stop=stop) == new[: new.index(stop)]


def refused(capsys, code: int, exit_code: int, folder: RunFolder, *arguments: str) -> str:
    assert main(["generate", "--run", str(folder.path), "--prompt", "a", *arguments]) == exit_code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"MZ-{code}") and err.count("\n") == 1 and len(err) <= 301
    return err


def test_folders_without_a_run(copy: RunFolder, tmp_path: Path, capsys):
    assert "no config.yaml" in refused(capsys, 113, 2, RunFolder(tmp_path / "nowhere"))
    tokenizer = load(str(copy.config)).data.tokenizer
    text = copy.config.read_text()
    copy.config.write_text(text.replace(f"tokenizer: {tokenizer}", "tokenizer:"))
    assert "no data.tokenizer" in refused(capsys, 113, 2, copy)
    copy.config.write_text(text.replace(f"tokenizer: {tokenizer}", f"tokenizer: {tmp_path}/gone.model"))
    assert "gone.model" in refused(capsys, 209, 1, copy)
    copy.config.write_text(text.replace(f"tokenizer: {tokenizer}", "tokenizer: bytes"))
    assert "config.yaml: the model was trained with tokenizer" in refused(capsys, 221, 1, copy)
    copy.config.write_text(text.replace("vocab: 400", "vocab: 300"))
    assert "400 pieces" in refused(capsys, 112, 2, copy)
    copy.config.write_text(text.replace("hidden: 40", "hidden: 48"))
    assert "expected" in refused(capsys, 404, 1, copy)
    copy.config.write_text(text.replace("layers: 2", "layers: 3"))
    assert "blocks.2.attention.out.bias: expected shape [40], got none" in refused(capsys, 404, 1, copy)


def test_folders_without_weights(copy: RunFolder, capsys):
    step = Store(copy.checkpoints).path(4)
    path = step / "shard_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "expected" in refused(capsys, 410, 1, copy)
    path.unlink()
    assert "cannot be read: No such file" in refused(capsys, 410, 1, copy)
    shutil.rmtree(step)
    (copy.checkpoints / ".step_00000009.x.tmp").mkdir()  # what a kill in the middle of a save leaves
    assert "of a run that has saved one" in refused(capsys, 402, 1, copy)


def test_newest_whole_one_of_several_checkpoints(finished: RunFolder, copy: RunFolder, capsys):
    """Larger numbers are newer, also with more digits; what is damaged is said, and passed over."""
    for name in ("step_00000003", "step_99999999", "step_100000000", "step_12", "step_00000999.old"):
        (copy.checkpoints / name).mkdir()
    assert Store(copy.checkpoints).steps() == [100000000, 99999999, 4, 3]
    assert generate(copy, "def ", Sampling(tokens=5)) == generate(finished, "def ", Sampling(tokens=5))
    first, second = capsys.readouterr().err.splitlines()
    assert "step_100000000/manifest.json: cannot be read" in first and "step_99999999/" in second
    assert first.endswith("; using an older step")


def test_command_line(finished: RunFolder):
    line = ["-m", "megazero", "generate", "--run", finished.path, "--prompt", "def ", "--tokens", "5", "--seed", "3"]
    result = command(*line, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    text = generate(finished, "def ", Sampling(tokens=5, seed=3))
    assert json.loads(result.stdout) == {"prompt": "def ", "text": text}


def test_eod_begins_a_text_without_a_prompt(finished: RunFolder, model: Transformer):
    tokenizer = open_tokenizer(str(load(str(finished.config)).data.tokenizer))
    new = draw(model, [tokenizer.eod], Sampling(tokens=5), stop=tokenizer.eod)
    assert generate(finished, "", Sampling(tokens=5)) == tokenizer.decode(new)


def test_sampling_error_is_a_user_error(finished: RunFolder):
    with pytest.raises(UserError, match="MZ-212"):
        generate(finished, "half a pair \ud800", Sampling(tokens=1))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


PROMPTS = ["def ", "class A", "", "a\u2028b", "x = "]


def test_prompts_of_a_file_go_on_where_they_stopped(
    finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in PROMPTS))
    line = ["generate", "--run", str(finished.path), "--prompts", str(prompts), "--tokens", "6", "--seed", "1"]
    assert main([*line, "--out", str(out), "--batch", "2"]) == 0
    whole = out.read_bytes()
    assert capsys.readouterr().out == f"{out}: 5 texts, 5 of them new\n"
    assert main([*line, "--out", str(out), "--json"]) == 0, "nothing is left to do"
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "texts": 5, "new": 0}
    assert [each["prompt"] for each in lines(out)] == PROMPTS
    assert all(each["text"].startswith(each["prompt"]) for each in lines(out))
    for cut in (0, len(whole.splitlines(keepends=True)[0]), len(whole) - 7):
        out.write_bytes(whole[:cut])
        assert main([*line, "--out", str(out), "--batch", "3"]) == 0
        assert out.read_bytes() == whole
    assert main([*line, "--out", str(tmp_path / "two.jsonl"), "--nproc", "2"]) == 0
    assert (tmp_path / "two.jsonl").read_bytes() == whole


def test_a_stop_text_ends_a_text(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    whole = generate(finished, "def ", Sampling(tokens=30))
    stop = whole[12:14]
    assert generate(finished, "def ", Sampling(tokens=30), stop=(stop,)) == "def " + whole[4:].partition(stop)[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--prompt", "a", "--out", "x"], "MZ-100 generate: expected --prompt TEXT, or --prompts FILE.jsonl"),
        ([], "MZ-100 generate: expected --prompt TEXT, or --prompts FILE.jsonl"),
        (
            ["--prompts", "none.jsonl", "--out", "x"],
            "MZ-229 none.jsonl: cannot be read: No such file or directory; give",
        ),
        (["--prompts", "latin.jsonl", "--out", "x"], "MZ-229 latin.jsonl: cannot be read: it is not UTF-8; give lines"),
        (["--prompts", "bad.jsonl", "--out", "x"], "MZ-229 bad.jsonl: line 3: expected either prompt, a text, or mess"),
        (["--prompts", "bad.jsonl", "--out", "x"], "got promt: str; give lines such as"),
        (["--prompts", "cut.jsonl", "--out", "x"], "MZ-229 cut.jsonl: line 1: not JSON: Invalid control character"),
        (["--prompts", "chat.jsonl", "--out", "x"], "MZ-229 prompt 1: expected a text, got messages; give --chat"),
        (["--prompts", "good.jsonl", "--out", "bad.jsonl"], "MZ-229 bad.jsonl: has 3 lines for 1 prompts"),
        (["--prompts", "good.jsonl", "--out", "other.jsonl"], "MZ-229 other.jsonl: line 1 is not the text of prompt 1"),
        (
            ["--prompts", "good.jsonl", "--out", "no/x"],
            "MZ-403 no/x: cannot be written: No such file or directory; giv",
        ),
        (["--prompt", "a", "--top-p", "1.5"], "MZ-100 generate: top_p is 1.5, expected 0 to 1"),
        (["--prompt", "a", "--temperature", "nan"], "MZ-100 generate: temperature is nan, expected 0 to 9.22e+18"),
        (["--prompt", "a", "--tokens", "0"], "MZ-100 generate: tokens is 0, expected 1 to 9.22e+18"),
        (["--prompt", "a", "--nproc", "3"], "--nproc: model.heads % parallel.tensor == 0 is broken"),
        (["--prompt", "a", "--chat"], "MZ-226 "),
    ],
)
def test_wrong_requests(
    arguments: list[str], line: str, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "a"}\n\n{"promt": "b"}\n')
    Path("cut.jsonl").write_text('{"prompt": "a\n')
    Path("latin.jsonl").write_bytes('{"prompt": "\xe9"}'.encode("latin-1"))
    Path("other.jsonl").write_text('{"prompt": "b", "text": "bc"}\n')
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    Path("good.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["generate", "--run", str(finished.path), *arguments]) != 0
    said = capfd.readouterr().err
    assert line in said and said.count("\n") == 1, said


def test_in_python(finished: RunFolder) -> None:
    opened = megazero.load(finished.path)
    text = opened.generate("def ", tokens=8, seed=3)
    assert text == generate(finished, "def ", Sampling(tokens=8, seed=3))
    assert opened.generate(["def ", "x"], tokens=8, seed=3)[0] == text
    ids = opened.generate([5, 6, 7], tokens=8, temperature=0)
    assert opened.generate([[5, 6, 7], [9]], tokens=8, temperature=0)[0] == ids and len(ids) <= 8
    assert opened.generate(torch.tensor([5, 6, 7]), tokens=8, temperature=0) == ids
    assert opened.generate([5, 6, 7], tokens=8, top_p=0.0) == ids, "the most probable token alone"
    assert opened.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "how", "said"),
    [
        ([5, VOCAB], {}, f"MZ-112 generate: id {VOCAB} is not one of {VOCAB}; change the prompt"),
        ([[5], [-1]], {}, "MZ-112 generate: id -1 is not one of"),
        ([[]], {}, "MZ-112 generate: expected ids, got none; change the prompt"),
        ([5] * 32, {}, "MZ-112 generate: expected at most 31 ids, as positions are learned, got 32; change the prompt"),
        ("a", {"repetition": 0}, "MZ-100 generate: repetition is 0, expected 0.01 to 9.22e+18"),
        ("a", {"seed": -1}, "MZ-100 generate: seed is -1, expected 0 to 9.22e+18"),
    ],
)
def test_wrong_requests_in_python(finished: RunFolder, prompt: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        megazero.load(finished.path).generate(prompt, **how)
    assert str(raised.value).startswith(said)


def test_other_keys_of_a_line_are_kept(finished: RunFolder, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"id": 7, "prompt": "def ", "text": "of another model"}\n')
    line = ["generate", "--run", str(finished.path), "--prompts", str(prompts), "--out", str(out), "--tokens", "3"]
    assert main(line) == main(line) == 0
    (found,) = lines(out)
    assert prompts.read_text().startswith('{"id": 7'), "prompts are only read"
    assert list(found) == ["id", "prompt", "text"] and found["id"] == 7 and found["text"].startswith("def ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("one\nmy notes", "has 1 lines for 1 prompts"),
        ("my notes", "line 1 is not the text of prompt 1"),
        ('{"prompt": "a", "id": 12, "text": "ab"}\n', "line 1 is not the text of prompt 1"),
        ('{"prompt": "a", "id": 1}\n', "line 1 is not the text of prompt 1"),
    ],
)
def test_a_file_that_is_no_output_is_left_alone(content: str, said: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(UserError, match=f"MZ-229 {out}: {said}; give another --out"):
        texts_in(out, [{"prompt": "a", "id": 1}])
    assert out.read_text() == content


@pytest.mark.parametrize("cut", [0, 5, 20, 29])
def test_an_incomplete_line_is_removed(cut: int, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    whole = '{"prompt": "é", "text": "ab"}\n'.encode()
    out.write_bytes(whole + whole[:cut])
    assert texts_in(out, [{"prompt": "é"}] * 2) == 1
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": null, "messages": [5]}', "got prompt: NoneType, messages: list"),
        ('{"prompt": "a", "messages": []}', "got prompt: str, messages: list"),
        ('{"prompt": "a", "note": "\\ud800"}', "surrogates not allowed"),
        ('{"prompt": "a", "x": 1e999}', "not JSON compliant"),
    ],
)
def test_lines_that_cannot_be_answered(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=f"MZ-229 {path}: line 1: .*{said}"):
        read_prompts(path)
    path.write_text('\ufeff{"prompt": null, "messages": [{"role": "user", "content": "a"}]}')
    assert len(read_prompts(path)) == 1
