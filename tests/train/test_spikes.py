"""Steps with unusual gradients: reported, or skipped, alike on every grid and after a resume."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.builders.assemble import StageInputs
from megazero.observe.jsonl import read_rows
from megazero.run.folder import RunFolder
from megazero.train.spikes import Spikes
from tests.optim.test_averages import begin
from tests.run.going_on import go_on
from tests.tiny_run import TinyData, built, repeating

STEPS, AT = 40, 36


def test_the_median_of_the_last_steps_decides() -> None:
    said = list[str]()
    spikes = Spikes(4.0, skips=True, say=said.append)
    for step in range(31):
        spikes.add(step + 1, 1e9 if step == 3 else 2.0)
        assert spikes.bound == torch.inf  # too few steps
    spikes.add(32, 2.0)
    assert spikes.bound == 8.0 and not spikes.count
    spikes.add(33, 8.0)
    spikes.add(34, float("nan"))
    assert not said
    spikes.add(35, 9.0)
    assert said == ["step 35: gradient norm 9 is 4.5 times the median of the last 33 steps; not updated"]
    other = Spikes(4.0, skips=False, say=said.append)
    other.begin(spikes.norms, spikes.count)
    assert (other.count, other.norms, other.bound) == (1, spikes.norms, torch.inf)
    for step in range(200):
        other.add(36 + step, 9.0)
    assert other.count < 70 and len(other.norms) == 128  # half a window later it is the usual norm


@pytest.mark.parametrize("action", ["skip", "log"])
def test_a_spike_is_skipped_or_reported(
    tiny_data: TinyData, tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (f"run.steps={STEPS}", "data.valid=null", f"run.on_spike={action}", "optimizer.clip=0")
    trainer, folder = built(tiny_data.load(tmp_path, *options))
    stage, weights = trainer.pipeline.stages[0], list[dict[str, Tensor]]()
    honest, begin_step = stage.run, trainer.engine.begin_step

    def begins() -> None:
        weights.append({name: value.clone() for name, value in trainer.engine.named_parameters()})
        begin_step()

    def run(x: Tensor | None, feed: StageInputs) -> Tensor:
        return honest(x, feed) * (100.0 if len(weights) == AT else 1.0)

    vars(trainer.engine)["begin_step"] = begins
    stage.run = run
    trainer.run()
    trainer.close()
    changed = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in pairwise(weights)]
    assert changed == [action == "log" or step + 1 != AT for step in range(STEPS - 1)]
    rows = read_rows(folder.metrics)
    assert [row.get("spikes", 0) for row in rows] == [int(step + 1 >= AT) for step in range(STEPS)]
    assert rows[-1]["skipped"] == int(action == "skip")
    said = capsys.readouterr().err
    assert said.count(f"step {AT}: gradient norm") == 1 and said.count("; not updated") == int(action == "skip")


@pytest.mark.full
def test_every_grid_and_a_resumed_run_skip_the_same_steps(tiny_data: TinyData, tmp_path: Path) -> None:
    own = ("run.on_spike=skip", "run.spike_factor=1.05", "schedule.steps=50", "batch.micro=1")
    runs = {"one": 1, "two": 2, "resumed": 2}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, ranks in runs.items():
        steps = 38 if name == "resumed" else 50
        begin(tiny_data, tmp_path / name, *own, f"run.steps={steps}", "checkpoint.every=19", nproc=ranks)
        if name == "resumed":
            assert go_on(tiny_data, tmp_path / name, *own, "run.steps=50", "checkpoint.every=19", nproc=ranks) == 0
        rows[name] = [repeating(row) for row in read_rows(RunFolder(tmp_path / name).metrics)]
    assert rows["resumed"] == rows["two"]
    assert [row["skipped"] for row in rows["one"]] == [row["skipped"] for row in rows["two"]]
    assert rows["two"][-1]["skipped"] == rows["two"][-1]["spikes"] > 1
