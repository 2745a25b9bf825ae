"""Evaluations in the loop: on the run's own grid, equal to one process; training does not depend on them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megazero.__main__ import main
from megazero.observe.jsonl import read_rows
from megazero.run.folder import RunFolder
from tests.evaluation.test_tasks import HERE
from tests.tiny_run import TinyData, command, saved_bytes

TEXT = "def f(x):\n    return x + 1\n\n" * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and tasks."""
    folder = tmp_path_factory.mktemp("during")
    (folder / "code.py").write_text(TEXT)
    for path in HERE.iterdir():
        (folder / path.name).write_text(path.read_text().replace("FOLDER", str(folder)))
    return folder


def asked(folder: Path, **more: object) -> list[str]:
    """The options of a run with all kinds of evaluations."""
    how: dict[str, object] = {"every": 2, "texts": f"[{folder / 'code.py'}]", "samples": '["def ", "steps: 1"]'}
    how["tasks"] = f"[{folder / 'choice.yaml'}, {folder / 'until.yaml'}]"
    return [f"observe.evaluate.{name}={value}" for name, value in (how | more).items()]


def line_of(tiny_data: TinyData, run: Path, *options: str) -> list[str]:
    own = (f"data.tokenizer={tiny_data.tokenizer}", "run.steps=5", "precision.dtype=fp64", "model.layers=4")
    line = ["train", "--config", str(tiny_data.config), f"run.dir={run}", "checkpoint.every=2", *own]
    return [*line, "data.valid_every=3", *options]


def results(run: Path) -> list[dict[str, Any]]:
    rows = read_rows(run / "metrics.jsonl")
    return [{key: row[key] for key in row if key.startswith(("valid_", "eval."))} for row in rows if row["step"] > 1]


@pytest.fixture(scope="module")
def plain(tiny_data: TinyData, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on one process without evaluations, and one with them."""
    runs = {name: tmp_path_factory.mktemp("runs") / name for name in ("without", "with")}
    assert main(line_of(tiny_data, runs["without"], "observe.every=1")) == 0
    assert main(line_of(tiny_data, runs["with"], "observe.every=1", *asked(folder))) == 0
    return runs


TEXTS = {"eval.code.py.loss", "eval.code.py.bits_per_byte"}


def test_training_does_not_depend_on_evaluations(plain: dict[str, Path]) -> None:
    without, own = (RunFolder(plain[name]) for name in ("without", "with"))
    assert saved_bytes(own) == saved_bytes(without)
    losses = [[row["loss"] for row in read_rows(run.metrics)] for run in (without, own)]
    assert losses[0] == losses[1]
    rows = results(plain["with"])
    assert [bool(TEXTS & row.keys()) for row in rows] == [True, False, True, True]  # steps 2, 3, 4, 5
    assert ["valid_loss" in row for row in rows] == [False, True, False, True]
    assert all(
        {"eval.mz_choice.acc", "eval.mz_until.exact_match", *TEXTS} <= row.keys() for row in rows if TEXTS & row.keys()
    )
    samples = plain["with"] / "samples"
    assert sorted(path.name for path in samples.iterdir()) == [f"step_{step}.jsonl" for step in (2, 4, 5)]
    texts = [json.loads(text) for text in (samples / "step_4.jsonl").read_text().splitlines()]
    assert [text["prompt"] for text in texts] == ["def ", "steps: 1"]
    assert all(text["text"].startswith(text["prompt"]) for text in texts) and any(len(t["text"]) > 20 for t in texts)


@pytest.mark.full
def test_the_last_evaluation_is_that_of_the_command(plain: dict[str, Path], folder: Path, capfd: Any) -> None:
    line = ["eval", "--run", str(plain["with"]), "--text", str(folder / "code.py"), "--json"]
    assert main([*line, "--tasks", str(folder / "choice.yaml")]) == 0
    found, last = json.loads(capfd.readouterr().out), results(plain["with"])[-1]
    assert found["texts"][str(folder / "code.py")]["loss"] == pytest.approx(last["eval.code.py.loss"], rel=1e-12)
    assert found["tasks"]["mz_choice.acc"] == last["eval.mz_choice.acc"]


GRIDS = {
    "tensor and pipeline": (4, ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")),
    "stage 3": (2, ("zero.stage=3", "batch.micro=1")),
}


@pytest.mark.full
@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_has_the_results_of_one_process(
    grid: str, tiny_data: TinyData, plain: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    ranks, options = GRIDS[grid]
    line = line_of(tiny_data, tmp_path / "run", "observe.every=1", *asked(folder), *options)
    assert main([*line, "--nproc", str(ranks)]) == 0
    for own, expected in zip(results(tmp_path / "run"), results(plain["with"]), strict=True):
        assert own == pytest.approx(expected, rel=1e-9)
    samples = [(run / "samples/step_5.jsonl").read_text() for run in (tmp_path / "run", plain["with"])]
    assert samples[0] == samples[1]


# What runs instead of train.py: it gets a signal while it evaluates for the second time.
IN_EVALUATION = """
import os, signal, sys
from megazero.evaluation import during
from megazero.__main__ import main

honest, asked = during._During.score, []

def score(self, done, stop):
    def signalled():
        asked.append(done)
        if asked.count(4) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return stop()
    return honest(self, done, signalled)

during._During.score = score
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_an_evaluation_that_was_broken_off_is_done_by_the_next_job(
    tiny_data: TinyData, plain: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    line = line_of(tiny_data, tmp_path / "run", "observe.every=1", *asked(folder), "checkpoint.resume=auto")
    done = command("-c", IN_EVALUATION, *line)
    assert done.returncode == 75 and "after step 4 of 5" in done.stdout, (done.stdout, done.stderr)
    assert not results(tmp_path / "run")[-1]
    assert main(line) == 0
    assert results(tmp_path / "run") == results(plain["with"])


full = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        full({"tasks": "[no_such_task]"}, "MZ-230 rank=0 no_such_task: Spec 'no_such_task' is not a registered"),
        ({"tasks": "[long.yaml]"}, "MZ-230 rank=0 mz_until: asks for 256 new tokens, model.seq_len is 32"),
        ({"samples": f'["{"x" * 400}"]'}, "MZ-112 rank=0 observe.evaluate.samples: expected at most"),
        full({"tasks": "[gone.yaml]"}, "MZ-230 rank=0 gone.yaml: Unable to find"),
        full({"tasks": "[odd.yaml]"}, "MZ-230 rank=0 odd.yaml: while scanning"),
        full({"tasks": "[choice.yaml, twice.yaml]"}, "MZ-230 rank=0 twice.yaml: mz_choice is also in choice.yaml"),
        ({"texts": "[none.txt]"}, "MZ-229 rank=0 none.txt: cannot be read: No such file"),
        ({"texts": "[a/x.txt, b/x.txt]"}, "MZ-229 rank=0 observe.evaluate.texts: two files are named x.txt"),
    ],
)
def test_wrong_requests_are_refused_before_training(
    options: dict[str, object],
    line: str,
    tiny_data: TinyData,
    folder: Path,
    tmp_path: Path,
    monkeypatch: Any,
    capfd: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(name).mkdir()
        Path(name, "x.txt").write_text("x")
    Path("long.yaml").write_text((folder / "until.yaml").read_text().replace("max_gen_toks: 12", "max_gen_toks: 256"))
    Path("odd.yaml").write_text('task: "odd')
    for name in ("choice", "twice"):
        Path(f"{name}.yaml").write_text((folder / "choice.yaml").read_text())
    Path("gone.yaml").write_text((HERE / "choice.yaml").read_text().replace("FOLDER", "gone"))
    how = [*asked(folder, **options)]
    assert main([*line_of(tiny_data, tmp_path / "run", *how), "--nproc", "2"]) != 0
    said = capfd.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1, said
    assert not (tmp_path / "run/metrics.jsonl").exists()
