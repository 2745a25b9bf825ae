"""Perplexity by sliding window: each token once, equal to one pass where a text fits, on every grid."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.__main__ import main
from megazero.evaluation.windows import batches_of, windows_of
from tests.optim.test_averages import EMA, begin
from tests.tiny_run import TinyData


@pytest.mark.parametrize("length", [1, 5, 6, 7, 20, 61])
@pytest.mark.parametrize(("size", "stride"), [(6, 2), (6, 6), (6, 1), (32, 16)])
def test_each_token_is_scored_once_with_enough_before_it(length: int, size: int, stride: int) -> None:
    seen = list[int]()
    for ids, scored in windows_of(range(1, length + 1), 0, size, stride):
        assert 2 <= len(ids) <= size + 1 and list(ids) == list(range(ids[0], ids[-1] + 1))
        seen += ids[len(ids) - scored :]
        assert ids[0] == 0 or len(ids) - 1 - scored >= size - stride
    assert seen == list(range(1, length + 1))


def test_ranks_share_the_windows() -> None:
    windows = list(windows_of(range(1, 24), 0, 6, 2))
    ranks = [list(batches_of(windows, 6, 2, rank, 3)) for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1
    scored = sorted(int(t) for of in ranks for b in of for t in b.targets_SB[b.valid_SB])
    assert scored == list(range(1, 24))


TEXT = "def f(x):\n    return x + 1\n\n" * 12


@pytest.fixture(scope="module")
def run(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    begin(tiny_data, folder / "run", *EMA, f"data.tokenizer={tiny_data.tokenizer}", "run.steps=4", "optimizer.lr=0.01")
    (folder / "run" / "text.py").write_text(TEXT)
    (folder / "run" / "short.py").write_text("def f(x):\n")
    return folder / "run"


def found(capfd: Any, run: Path, *arguments: str) -> dict[str, dict[str, float]]:
    texts = [str(run / "text.py"), str(run / "short.py")]
    assert main(["eval", "--run", str(run), "--json", *arguments, "--text", *texts]) == 0
    return json.loads(capfd.readouterr().out)["texts"]


def by_hand(run: Path, name: str, stride: int, *, average: bool = False) -> tuple[float, float]:
    """Mean loss and bits per byte, window by window, from the logits of `megazero.load`."""
    opened = megazero.load(run, torch.float32, average=average)
    assert opened.tokenizer is not None
    text = (run / name).read_text()
    ids, total = opened.tokenizer.encode(text), 0.0
    for window, scored in windows_of(ids, opened.tokenizer.eod, 32, stride):
        logits = opened.logits(window[:-1]).double().log_softmax(-1)
        total -= float(sum(logits[i, window[i + 1]] for i in range(len(window) - 1 - scored, len(window) - 1)))
    return total / len(ids), total / math.log(2) / len(text.encode())


def test_one_process_equals_the_logits(run: Path, capfd: Any) -> None:
    for stride, average in ((16, False), (5, True)):
        own = found(capfd, run, "--stride", str(stride), *["--average"] * average)
        for name in ("text.py", "short.py"):
            loss, bits = by_hand(run, name, stride, average=average)
            of = own[str(run / name)]
            assert of["loss"] == pytest.approx(loss, rel=1e-5) and of["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
            assert of["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize(
    "grid", [("--nproc", "2"), ("--nproc", "4", "--tensor", "2"), ("--nproc", "2", "--tensor", "2")]
)
def test_every_grid_finds_the_same(run: Path, grid: tuple[str, ...], capfd: Any) -> None:
    expected, own = found(capfd, run, "--batch", "3"), found(capfd, run, *grid)
    for name, of in expected.items():
        assert own[name] == pytest.approx(of, rel=1e-6)


full = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--text", "none.txt"], "MZ-229 none.txt: cannot be read: No such file"),
        (["--text", "empty.txt"], "MZ-229 empty.txt: is empty; give a file of UTF-8 text"),
        (["--text", "odd.txt"], "MZ-229 odd.txt: cannot be read: byte 1 is not UTF-8"),
        full(["--tasks", "no_such_task"], "MZ-230 no_such_task: Spec 'no_such_task' is not a registered task"),
        (["--tasks", "a.txt", "--nproc", "2"], "MZ-230 rank=0 a.txt: Expected YAML dict from"),
        full(["--tasks", "none.yaml"], "MZ-230 none.yaml: "),
        (["--text", "a.txt", "--stride", "33"], "MZ-106 eval: --stride 33 is more than a window, model.seq_len 32"),
        ([], "MZ-100 eval: expected --text FILE, --tasks A,B, or both"),
        (["--text", "a.txt", "--nproc", "3", "--tensor", "2"], "MZ-106 eval: --tensor 2 does not divide --nproc 3"),
        (["--text", "a.txt", "--nproc", "3", "--tensor", "3"], "MZ-106 eval: model.heads % parallel.tensor == 0 is"),
    ],
)
def test_wrong_requests(
    arguments: list[str], line: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("odd.txt").write_bytes(b"a\xff")
    Path("a.txt").write_text("a")
    assert main(["eval", "--run", str(run), *arguments]) != 0
    said = capfd.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1, said


def test_without_the_package(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "megazero.evaluation.tasks", raising=False)
    assert main(["eval", "--run", str(run), "--tasks", "hellaswag"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("MZ-121: the package lm-eval is not installed") and "pip install lm-eval" in said
    assert said.count("\n") == 1
