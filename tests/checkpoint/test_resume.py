"""A run that goes on is the run that was never interrupted: every file of its last step, bit for bit, and every row."""

import json
import shutil
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.observe.jsonl import read_rows
from megazero.run.folder import RunFolder
from megazero.tools.training.launch import launch
from tests.tiny_run import TinyData, command, repeating

STEPS = 8
OPTIONS = ("model.dropout=0.2", f"run.steps={STEPS}", "schedule.warmup=4", "checkpoint.every=1", "data.valid_every=3")


def rows(folder: Path) -> list[dict]:
    return [repeating(row) for row in read_rows(folder / "metrics.jsonl")]


def cut(whole: Path, folder: Path, step: int) -> Path:
    """The run as it was when it was killed some time after `step` had been saved."""
    shutil.copytree(whole, folder)
    saved = Store(folder / "checkpoints")
    for later in saved.steps():
        if later > step:
            shutil.rmtree(saved.path(later))
    return folder


def same_step(one: Path, other: Path, step: int = STEPS) -> None:
    a, b = (Store(folder / "checkpoints").path(step) for folder in (one, other))
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir()) and len(names) > 1
    for name in names:
        if name != "manifest.json":
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    mine, theirs = (read_manifest(folder).model_dump(exclude={"config", "digest"}) for folder in (a, b))
    for found in (mine, theirs):  # how long steps took is another every time
        found["progress"]["row"] = repeating(found["progress"]["row"])
    assert mine == theirs


# What is under way at a save: an epoch, a warm-up, accumulation, a loss scale that backs off.
KINDS = {
    "fp32": (),
    "bf16": ("precision.dtype=bf16",),
    "fp16": ("precision.dtype=fp16",),
    "eod": ("data.mask_eod=true", "batch.micro=1"),
}


@pytest.fixture(scope="module")
def uninterrupted(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp(kind) / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("megazero.optim.loss_scale.INITIAL", 2.0**30)  # overflows for a few steps
                assert launch(tiny_data.load(found[kind], *OPTIONS, *KINDS[kind]), "small", 1) == 0
        return found[kind]

    return run


@pytest.mark.parametrize("step", [1, 3, *(pytest.param(step, marks=pytest.mark.full) for step in (2, 5)), 7])
@pytest.mark.parametrize("kind", KINDS)
def test_going_on_is_bitwise(tiny_data: TinyData, uninterrupted, tmp_path: Path, kind: str, step: int, capsys) -> None:
    whole = uninterrupted(kind)
    again = cut(whole, tmp_path / "run", step)
    assert len(rows(again)) == STEPS
    code = launch(tiny_data.load(again, *OPTIONS, *KINDS[kind], "checkpoint.resume=auto"), "small", 1)
    assert code == 0 and f"going on from {Store(again / 'checkpoints').path(step)}" in capsys.readouterr().out
    assert rows(again) == rows(whole)
    for later in range(step + 1, STEPS + 1):
        same_step(whole, again, later)


def test_the_saves_lay_where_it_is_hard(uninterrupted) -> None:
    progress = [
        read_manifest(Store(uninterrupted("fp16") / "checkpoints").path(step)).progress for step in range(1, STEPS + 1)
    ]
    assert all(found is not None for found in progress)
    scales = [found.loss_scale for found in progress if found]
    assert scales[0] > scales[1] > scales[2] and progress[2].overflows == 3, "a backoff is under way"
    assert progress[-1].updates == STEPS - progress[-1].skipped
    lr = [row["lr"] for row in rows(uninterrupted("fp32"))]
    assert lr[0] < lr[1] < lr[2] < lr[3], "a warm-up is under way"
    assert [found.next_sample for found in progress if found] == [4 * step for step in range(1, STEPS + 1)]


@pytest.mark.parametrize(
    "layout",
    [
        ("--nproc", "2", "zero.stage=2", "batch.micro=1"),
        # What rounding has lost is forgotten at a save, by both.
        ("--nproc", "2", "zero.quantize.gradients=int4", "zero.quantize.error_feedback=true", "checkpoint.every=3"),
        pytest.param(("parallel.tensor=2", "parallel.sequence=true", "zero.stage=1"), marks=pytest.mark.full),
        pytest.param(("--nproc", "4", "parallel.pipeline=2", "zero.stage=3", "batch.micro=1"), marks=pytest.mark.full),
    ],
    ids=["data", "fed back", "tensor", "pipeline"],
)
def test_going_on_with_several_ranks_is_bitwise(tiny_data: TinyData, tmp_path: Path, layout: tuple[str, ...]) -> None:
    line = ("train.py", "--config", tiny_data.config, *OPTIONS, *layout)
    done = command(*line, f"run.dir={tmp_path / 'whole'}", "checkpoint.async=true")
    assert (done.returncode, done.stderr) == (0, "")
    again = cut(tmp_path / "whole", tmp_path / "again", 3)
    done = command(*line, f"run.dir={again}", "checkpoint.resume=auto")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(again) == rows(tmp_path / "whole")
    same_step(tmp_path / "whole", again)


def test_a_finished_run_has_nothing_to_do(tiny_data: TinyData, uninterrupted, tmp_path: Path, capsys) -> None:
    again = Path(shutil.copytree(uninterrupted("fp32"), tmp_path / "run"))
    assert launch(tiny_data.load(again, *OPTIONS, "checkpoint.resume=auto"), "small", 1) == 0
    assert rows(again) == rows(uninterrupted("fp32"))
    same_step(uninterrupted("fp32"), again)


def test_more_steps_are_more_steps(tiny_data: TinyData, uninterrupted, tmp_path: Path, capsys) -> None:
    again = Path(shutil.copytree(uninterrupted("fp32"), tmp_path / "run"))
    options = (*OPTIONS, "checkpoint.resume=auto", f"run.steps={STEPS + 2}", "optimizer.lr=1e-3")
    assert launch(tiny_data.load(again, *options), "small", 1) == 0
    assert f"with run.steps {STEPS} -> {STEPS + 2}, optimizer.lr 0.002 -> 0.001" in capsys.readouterr().out
    assert [row["step"] for row in rows(again)] == list(range(1, STEPS + 3))


@pytest.mark.parametrize("kept", [False, True])
def test_another_learning_rate_is_said(tiny_data: TinyData, uninterrupted, tmp_path: Path, capsys, kept: bool) -> None:
    """And `schedule.steps` keeps the one of fewer steps."""
    again = Path(shutil.copytree(uninterrupted("fp32"), tmp_path / "run"))
    options = (*OPTIONS, "checkpoint.resume=auto", f"run.steps={2 * STEPS}")
    options += (f"schedule.steps={STEPS}",) * kept
    assert launch(tiny_data.load(again, *options), "small", 1) == 0
    out, rates = capsys.readouterr().out, [row["lr"] for row in rows(again)][STEPS - 1 :]
    said = f"learning rate of step {STEPS + 1}: 0.0002 before these options, {rates[1]:.4g} now; "
    if kept:
        assert set(rates) == {2e-4} and "learning rate of step" not in out
    else:
        assert rates[1] > 2 * rates[0] and f"{said}schedule.steps={STEPS} keeps the old schedule\n" in out


def test_auto_begins_where_nothing_is_saved(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """Also in a folder whose first job was killed before its first save."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.metrics.write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "lo')
    config = tiny_data.load(folder.path, "run.steps=2", "checkpoint.resume=auto", "data.valid=null")
    assert launch(config, "small", 1) == 0
    assert [row["step"] for row in read_rows(folder.metrics)] == [1, 2] and Store(folder.checkpoints).steps() == [2]


def test_another_run_s_folder_or_step(tiny_data: TinyData, uninterrupted, tmp_path: Path, capsys) -> None:
    """Goes on in a folder of its own; the other is left as it is, and is another run."""
    source = uninterrupted("fp32")
    step = Store(source / "checkpoints").path(5)
    for name, path in (("run", source), ("step", step), ("steps", step.parent)):
        options = (*OPTIONS, f"checkpoint.resume={path}", f"run.steps={STEPS + 1}")
        assert launch(tiny_data.load(tmp_path / name, *options), "small", 1) == 0
        first = 5 if name == "step" else STEPS
        assert [row["step"] for row in rows(tmp_path / name)] == list(range(first + 1, STEPS + 2))
        made = read_manifest(Store(tmp_path / name / "checkpoints").path(STEPS + 1))
        assert made.run != read_manifest(step).run
    assert Store(source / "checkpoints").steps() == list(range(STEPS, 0, -1))


def test_a_line_that_begins_elsewhere_can_be_repeated(
    tiny_data: TinyData, uninterrupted, tmp_path: Path, capsys
) -> None:
    """It begins there once, and then goes on in its own folder; another source is another run, and refused."""
    step = Store(uninterrupted("fp32") / "checkpoints").path(3)

    def line(*overrides: str):
        return tiny_data.load(tmp_path / "run", *OPTIONS, f"checkpoint.resume={step}", *overrides)

    assert launch(line("run.steps=5"), "small", 1) == 0
    assert launch(line(), "small", 1) == 0
    assert f"going on from {Store(tmp_path / 'run/checkpoints').path(5)}" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "run")] == [4, 5, 6, 7, 8]
    other = line("checkpoint.resume=" + str(Store(uninterrupted("fp32") / "checkpoints").path(2)))
    assert "of a run that did not begin at" in refused(other, 413)


def test_a_step_of_another_run_is_saved_here_before_anything_else(
    tiny_data: TinyData, uninterrupted, tmp_path: Path, capsys
) -> None:
    """Where there is nothing left to train, or no time to begin: what is said to go on from is there."""
    source = uninterrupted("fp32")
    config = tiny_data.load(tmp_path / "run", *OPTIONS, f"checkpoint.resume={source}")
    assert launch(config, "small", 1) == 0
    assert Store(tmp_path / "run/checkpoints").steps() == [STEPS]
    one, other = (
        Store(run / "checkpoints").path(STEPS) / "shard_00000.safetensors" for run in (source, tmp_path / "run")
    )
    assert one.read_bytes() == other.read_bytes()


def test_fewer_steps_than_the_other_run_has_done(tiny_data: TinyData, uninterrupted, tmp_path: Path) -> None:
    options = (*OPTIONS, f"run.steps={STEPS - 1}", f"checkpoint.resume={uninterrupted('fp32')}")
    line = refused(tiny_data.load(tmp_path / "run", *options), 120)
    assert (
        f"step {STEPS} is saved, but run.steps is {STEPS - 1}" in line and not (tmp_path / "run/metrics.jsonl").exists()
    )


def refused(config, code: int) -> str:
    with pytest.raises(UserError, match=f"MZ-{code}") as caught:
        launch(config, "small", 1)
    assert len(str(caught.value)) <= 300 and caught.value.exit_code != 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (("model.hidden=48", "model.layers=1"), "model.layers 2 -> 1, model.hidden 40 -> 48"),
        (("model.vocab=416",), "model.vocab 400 -> 416"),
        (("precision.dtype=fp64",), "precision.dtype fp32 -> fp64"),
        (("precision.dtype=bf16",), "precision.dtype fp32 -> bf16"),
        (("optimizer.betas=[0.9,0.9]",), "optimizer.betas [0.9, 0.95] -> [0.9, 0.9]"),
        (("run.seed=3",), "run.seed 0 -> 3"),
        (("batch.global=8",), "batch.global 4 -> 8"),
        (("data.tokenizer=null",), "tokenizer"),
        (("data.valid=0.3",), "data.valid 0.1 -> 0.3"),
    ],
)
def test_another_model_is_refused(tiny_data: TinyData, uninterrupted, tmp_path: Path, changes, what: str) -> None:
    """And nothing of the run is touched."""
    again = Path(shutil.copytree(uninterrupted("fp32"), tmp_path / "run"))
    before = {path: path.read_bytes() for path in again.rglob("*") if path.is_file() and path.suffix != ".log"}
    line = refused(tiny_data.load(again, *OPTIONS, *changes, "checkpoint.resume=auto"), 412)
    assert what in line
    assert {path: path.read_bytes() for path in again.rglob("*") if path.is_file() and path.suffix != ".log"} == before


def test_an_older_step_does_not_overwrite_newer_ones(tiny_data: TinyData, uninterrupted, tmp_path: Path) -> None:
    again = Path(shutil.copytree(uninterrupted("fp32"), tmp_path / "run"))
    step = Store(again / "checkpoints").path(5)
    line = refused(tiny_data.load(again, *OPTIONS, f"checkpoint.resume={step}"), 413)
    assert f"holds step {STEPS}" in line and Store(again / "checkpoints").steps() == list(range(STEPS, 0, -1))


def test_one_step_that_is_asked_for_is_that_one_or_none(tiny_data: TinyData, uninterrupted, tmp_path: Path) -> None:
    again = Path(shutil.copytree(uninterrupted("fp32"), tmp_path / "run"))
    step = Store(again / "checkpoints").path(5)
    (step / "manifest.json").write_text("{}")
    line = refused(tiny_data.load(tmp_path / "new", *OPTIONS, f"checkpoint.resume={step}"), 411)
    assert "none of 1 checkpoints is whole (steps 5); restore a checkpoint, or start again" in line


def test_nothing_to_go_on_from(tiny_data: TinyData, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        line = refused(tiny_data.load(tmp_path / "run", f"checkpoint.resume={path}"), 402)
        assert str(path) in line


def test_weights_of_the_config_s_manifest_are_plain_json(uninterrupted) -> None:
    content = json.loads((Store(uninterrupted("fp32") / "checkpoints").path(3) / "manifest.json").read_text())
    assert content["config"]["model.hidden"] == 40 and content["progress"]["next_sample"] == 12
