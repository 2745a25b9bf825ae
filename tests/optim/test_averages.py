"""Averages of parameters: kept by every rank's optimizer, saved and resumed, used for validation, text and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.__main__ import main
from megazero.checkpoint.store import Store
from megazero.observe.jsonl import read_rows
from megazero.run.folder import RunFolder
from megazero.tools.opened import load
from tests.library.odd_modules import of_numbers
from tests.library.running import ADAMW, on_ranks, sharded_case
from tests.run.going_on import LINE, go_on
from tests.tiny_run import TinyData, repeating, saved_bytes

DECAY = 0.6
EMA = ("optimizer.average.kind=ema", f"optimizer.average.decay={DECAY}")


def mean(values: list[Tensor]) -> Tensor:
    """The average of the values after each update: a mean of all, until the decay rate is reached."""
    found = torch.zeros_like(values[0])
    for n, value in enumerate(values, 1):
        decay = min(DECAY, 1 - 1 / n)
        found = decay * found + (1 - decay) * value
    return found


def begin(tiny_data: TinyData, run: Path, *overrides: str, nproc: int = 1) -> None:
    line = ["train", "--config", str(tiny_data.config), f"run.dir={run}", *LINE, *overrides]
    assert main([*line, "--nproc", str(nproc)]) == 0


@pytest.mark.full
def test_an_interrupted_run_has_the_averages_of_a_whole_one(tiny_data: TinyData, tmp_path: Path) -> None:
    whole, cut, other = (tmp_path / name for name in ("whole", "cut", "other"))
    begin(tiny_data, whole, *EMA, "zero.stage=2", "run.steps=6", nproc=2)
    for run, ranks in ((cut, 2), (other, 1)):
        begin(tiny_data, run, *EMA, "zero.stage=2", "run.steps=3", "schedule.steps=6", nproc=2)
        more = () if ranks == 2 else ("batch.micro=1",)
        assert go_on(tiny_data, run, *EMA, "run.steps=6", "schedule.steps=6", *more, nproc=ranks) == 0
    assert saved_bytes(RunFolder(cut)) == saved_bytes(RunFolder(whole))
    averages = [load(run, average=True).model.state_dict() for run in (whole, other)]
    store = Store(RunFolder(whole).checkpoints)
    steps = [load(store.path(step)).model.state_dict() for step in range(1, 7)]
    for name, value in averages[0].items():
        assert torch.allclose(value, mean([step[name] for step in steps]), rtol=1e-6, atol=1e-7), name
        assert torch.allclose(value, averages[1][name], rtol=1e-5, atol=1e-6), name
    assert any(not torch.equal(value, steps[-1][name]) for name, value in averages[0].items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_validation_uses_averages_and_training_does_not(tiny_data: TinyData, tmp_path: Path, dtype: str) -> None:
    own = (*EMA, f"precision.dtype={dtype}", "zero.stage=3", "data.valid=0.2", "data.valid_every=2", "run.steps=4")
    rows = {}
    for kind in ("true", "false"):
        line = ["train", "--config", str(tiny_data.config), f"run.dir={tmp_path / kind}", "observe.every=1", *own]
        assert main([*line, f"optimizer.average.for_validation={kind}", "--nproc", "2"]) == 0
        rows[kind] = read_rows(RunFolder(tmp_path / kind).metrics)
    first, second = (
        [{key: value for key, value in repeating(row).items() if "valid" not in key} for row in rows[kind]]
        for kind in rows
    )
    assert first == second
    assert saved_bytes(RunFolder(tmp_path / "true")) == saved_bytes(RunFolder(tmp_path / "false"))
    losses = [[row["valid_loss"] for row in rows[kind] if row.get("valid_loss")] for kind in rows]
    assert len(losses[0]) == 2 and all(a != b for a, b in zip(*losses, strict=True))


def test_averages_can_be_begun_and_dropped_on_a_resume(tiny_data: TinyData, tmp_path: Path) -> None:
    begin(tiny_data, tmp_path, "run.steps=2", "schedule.steps=6")
    assert go_on(tiny_data, tmp_path, *EMA, "run.steps=4", "schedule.steps=6") == 0
    store = Store(RunFolder(tmp_path).checkpoints)
    w2, w3, w4 = (load(store.path(step)).model.state_dict() for step in (2, 3, 4))
    for name, value in load(tmp_path, average=True).model.state_dict().items():
        third = DECAY * w2[name] + (1 - DECAY) * w3[name]  # it begins with the weights of the resumed step
        assert torch.allclose(value, DECAY * third + (1 - DECAY) * w4[name], rtol=1e-6, atol=1e-7), name
    assert go_on(tiny_data, tmp_path, "run.steps=6", "schedule.steps=6") == 0


def test_text_and_exports_on_request(tiny_data: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, hf = tmp_path / "run", tmp_path / "hf"
    begin(tiny_data, run, *EMA, f"data.tokenizer={tiny_data.tokenizer}", "run.steps=3", "optimizer.lr=0.01")
    assert main(["export", "--to", "hf", "--run", str(run), "--out", str(hf), "--average", "--no-proof"]) == 0
    expected = load(run, average=True).model.state_dict()
    for name, value in load(hf).model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    line = ["generate", "--run", str(run), "--prompt", "the", "--tokens", "2"]
    assert main([*line, "--average"]) == 0
    plain = tmp_path / "plain"
    begin(tiny_data, plain, "run.steps=1")
    capsys.readouterr()
    assert main(["export", "--to", "hf", "--run", str(plain), "--out", str(tmp_path / "no"), "--average"]) == 1
    assert "holds no averages; train with optimizer.average.kind=ema" in capsys.readouterr().err


def narrow(stage: int, folder: Path, first: int) -> list[dict[str, Tensor]]:
    """The weights after each of 4 steps in bf16 without masters; saved after 2 of them."""
    options: dict[str, Any] = {"name": "adamw", **ADAMW, "moments": "bf16"}
    sharded, found = sharded_case("plain", stage, optimizer=options, precision="bf16", masters="none"), []
    if first:
        sharded.load(folder)
    for step in range(first, 4):
        sharded.backward(of_numbers(sharded, step, sharded.rank).float())
        sharded.step()
        found.append(sharded.full_state_dict(everywhere=True))
        if step == 1 and not first:
            sharded.save(folder)
    held = sharded.memory()["optimizer"]["now"]
    assert held == 2 * sum(2 * len(unit.masters) for unit in sharded._assembly.engine.units)
    return found


def test_the_library_updates_in_bf16(tmp_path: Path) -> None:
    *_, third, last = on_ranks(2, narrow, 3, tmp_path, 0)[0]
    for other, first in (
        (on_ranks(2, narrow, 1, tmp_path / "other", 0)[0], 0),
        (on_ranks(2, narrow, 3, tmp_path, 2)[0], 2),
    ):
        assert len(other) == 4 - first
        for name, value in last.items():
            assert torch.equal(other[-1][name], value) and torch.equal(other[-2][name], third[name]), name


def averaged(stage: int, folder: Path, first: int) -> list[dict[str, Tensor]]:
    """The weights after each of 3 steps, the averages, and the weights after those were used."""
    options: dict[str, Any] = {"name": "adamw", **ADAMW, "average": {"kind": "ema", "decay": DECAY}}
    sharded, found = sharded_case("plain", stage, optimizer=options), []
    if first:
        sharded.load(folder)
    for step in range(first, 3):
        sharded.backward(of_numbers(sharded, step, sharded.rank))
        sharded.step()
        found.append(sharded.full_state_dict(everywhere=True))
        if step == 1 and not first:
            sharded.save(folder)
    with sharded.averaged():
        found.append(sharded.full_state_dict(everywhere=True))
    found.append(sharded.full_state_dict(everywhere=True))
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_library_keeps_averages(stage: int, tmp_path: Path) -> None:
    one, two, three, average, again = on_ranks(2, averaged, stage, tmp_path, 0)[0]
    *_, resumed, _ = on_ranks(2, averaged, stage, tmp_path, 2)[0]
    for name, value in average.items():
        assert torch.allclose(value, mean([one[name], two[name], three[name]]), rtol=1e-12, atol=1e-12), name
        assert torch.equal(resumed[name], value), name
        assert torch.equal(again[name], three[name]), name
