"""Rows of metrics say when, where in the data, how fast, and where the seconds went; and a stop has one."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.progress import Progress
from megazero.checkpoint.save import Checkpoints
from megazero.checkpoint.store import Store
from megazero.comm.grid import single
from megazero.observe.jsonl import read_rows
from megazero.observe.phases import PHASES
from megazero.tools.training.launch import launch
from tests.tiny_run import TinyData, built, command, train
from tests.windows import open_datasets


def test_time_place_and_speed(tiny_data: TinyData, tmp_path: Path) -> None:
    before = time.time()
    config = tiny_data.load(tmp_path, "run.steps=6", "observe.every=2")
    outcome = train(config)
    windows = open_datasets(config.data.train, config.data.valid, 32, 400, False)[0].num_windows
    times = outcome.column("time")
    assert times == sorted(times) and before <= times[0] and times[-1] <= time.time()
    assert outcome.column("samples") == [8, 16, 24]
    assert outcome.column("epoch") == [samples / windows for samples in (8, 16, 24)]
    assert outcome.column("tokens_per_second_mean")[0] == outcome.column("tokens_per_second")[0]
    speeds = outcome.column("tokens_per_second")
    assert all(min(speeds) <= mean <= max(speeds) for mean in outcome.column("tokens_per_second_mean"))


@pytest.mark.parametrize(
    ("clip", "clipped"), [("1e-3", 1), *(pytest.param(clip, 0, marks=pytest.mark.full) for clip in ("1e9", "0"))]
)
def test_clipped_or_not(tiny_data: TinyData, tmp_path: Path, clip: str, clipped: int) -> None:
    outcome = train(tiny_data.load(tmp_path, f"optimizer.clip={clip}", "data.valid=null"))
    assert outcome.column("clipped") == [clipped] * 4


def test_clipped_is_said_of_the_steps_that_were(tiny_data: TinyData, tmp_path: Path) -> None:
    free = train(tiny_data.load(tmp_path / "free", "optimizer.clip=0", "run.steps=1", "data.valid=null"))
    (norm,) = free.column("grad_norm")
    for clip, clipped in ((norm, 0), (norm * (1 - 1e-6), 1)):
        some = train(
            tiny_data.load(tmp_path / str(clipped), f"optimizer.clip={clip!r}", "run.steps=1", "data.valid=null")
        )
        assert some.column("clipped") == [clipped]


@pytest.mark.parametrize("tokenizer", [(), ("data.tokenizer=null",)], ids=["known", "unknown"])
def test_bits_per_byte_beside_the_validation_loss(tiny_data: TinyData, tmp_path: Path, tokenizer) -> None:
    outcome = train(tiny_data.load(tmp_path, "data.valid_every=2", *tokenizer))
    has = [("valid_loss" in row, "valid_bits_per_byte" in row) for row in outcome.rows]
    assert has == [(False, False), (True, not tokenizer)] * 2
    if not tokenizer:
        assert outcome.rows[-1]["valid_bits_per_byte"] == outcome.trainer.scores["valid_bits_per_byte"]


def test_every_second_is_in_a_row_and_in_its_phase(tiny_data: TinyData, tmp_path: Path, monkeypatch) -> None:
    """By a clock that only batches, saves and validations move, in rows of two steps."""
    options = ("run.steps=4", "observe.every=2", "checkpoint.every=1", "data.valid_every=4")
    trainer, folder = built(tiny_data.load(tmp_path, *options))
    clock = [0.0]
    monkeypatch.setattr(trainer.recorder._phases, "_clock", lambda: clock[0])

    def takes(seconds: float, holder: object, name: str) -> None:
        honest = getattr(holder, name)

        def slow(*arguments: object) -> object:
            clock[0] += seconds
            return honest(*arguments)

        monkeypatch.setattr(holder, name, slow)

    takes(1.0, trainer.loader, "step")
    takes(10.0, trainer.checkpoints, "save")
    takes(100.0, trainer.evaluations[0], "score")
    trainer.run()
    trainer.close()
    rows = read_rows(folder.metrics)
    assert [list(row["seconds"]) for row in rows] == [list(PHASES)] * 2
    nothing = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    assert rows[0]["seconds"] == {"data": 2.0, **nothing, "save": 20.0, "validation": 0.0}
    assert rows[1]["seconds"] == {"data": 2.0, **nothing, "save": 20.0, "validation": 100.0}


def test_the_passes_are_told_apart(tiny_data: TinyData, tmp_path: Path) -> None:
    outcome = train(tiny_data.load(tmp_path, "model.layers=4", "model.hidden=160", "data.valid=null"))
    seconds = outcome.rows[-2]["seconds"]
    assert all(seconds[phase] > 0 for phase in ("data", "forward", "backward", "update"))
    assert sum(seconds.values()) >= outcome.rows[-2]["step_time"], "the whole of the interval"


STOPPED = """
import os, signal, sys, time
from megazero.run import checkpointing
from megazero.__main__ import main
from megazero.data.loader import BatchLoader

honest, retire = BatchLoader.step, checkpointing.retire

def step(self, step):
    if step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return honest(self, step)

def slowly(*arguments):
    time.sleep(0.3)  # a disk that takes its time
    retire(*arguments)

BatchLoader.step, checkpointing.retire = step, slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "ranks", [(), pytest.param(("parallel.tensor=2",), marks=pytest.mark.full)], ids=["one", "two"]
)
def test_a_stop_has_its_row_and_keeps_no_more_than_asked(
    tiny_data: TinyData, tmp_path: Path, ranks: tuple[str, ...], capsys
) -> None:
    """Between two rows, behind a validation that there was no time for: that comes when the run goes on."""
    line = ["--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", "run.steps=8", "observe.every=5"]
    line += ["data.valid_every=3", "checkpoint.resume=auto", "checkpoint.every=1", "checkpoint.keep=1", *ranks]
    done = command("-c", STOPPED, "train", *line)
    assert (done.returncode, done.stderr) == (75, ""), done.stderr
    (step,) = Store(tmp_path / "run/checkpoints").steps()
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert rows[-1]["step"] == step in (3, 4) and f"step {step}/8" in done.stdout
    went_on = command("train.py", *line)
    assert (went_on.returncode, went_on.stderr) == (0, "")
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == sorted({3, step, 5, 6, 8})
    assert [row["step"] for row in rows if "valid_loss" in row] == [3, 6, 8]


def test_a_stop_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    answers, world, cpu = threading.Event(), single()["world"], torch.device("cpu")

    def tidy(_: Callable[[], bool]) -> None:
        answers.wait()

    options = {"every": 1, "background": False, "conclude": lambda *_: None, "tidy": tidy}
    checkpoints = Checkpoints(Store(tmp_path / "checkpoints"), [], world, cpu, **options)  # type: ignore[arg-type]
    checkpoints.save(1, Progress(updates=1, skipped=0, overflows=0, next_sample=8, loss_scale=None, good_steps=0))
    began = time.monotonic()
    checkpoints.tidy(0.05)
    assert 0.05 <= time.monotonic() - began < 1.0
    answers.set()
    checkpoints.close()


def test_a_warm_up_that_is_longer_than_the_run_is_said(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    for warmup, said in ((5, True), (4, False)):
        config = tiny_data.load(tmp_path / str(warmup), f"schedule.warmup={warmup}", "data.valid=null")
        assert launch(config, "small", 1) == 0
        err = capsys.readouterr().err
        line = (
            "warning: schedule.warmup 5 is longer than run.steps 4: the learning rate ends at 0.0016 and never reaches"
        )
        assert err == (f"{line} optimizer.lr 0.002\n" if said else "")


def test_a_vocabulary_that_is_larger_than_the_tokenizers_is_said(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    config = tiny_data.load(tmp_path, "model.vocab=512", "data.valid=null", "run.steps=1", "schedule.warmup=0")
    assert launch(config, "small", 1) == 0
    used = f"{tiny_data.tokenizer} has 400 ids: 112 rows (21.88%) are never used\n"
    assert capsys.readouterr().err == f"warning: model.vocab is 512, {used}"
