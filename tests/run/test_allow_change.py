"""Options that change unplanned, when a run goes on: with permission, said, and kept in the manifests' history."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.__main__ import main
from megazero.checkpoint.manifest import read_manifest
from megazero.config.file import load
from megazero.config.stages import Course
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.observe.jsonl import read_rows
from megazero.run.data import open_data
from megazero.tools.training.launch import launch
from tests.run.going_on import LINE, go_on
from tests.sources import options
from tests.tiny_run import TinyData, repeating

FULL = pytest.mark.full


@pytest.fixture(scope="module")
def made(tiny_data: TinyData, paths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on the first two sources."""
    folder = tmp_path_factory.mktemp("made") / "run"
    assert launch(tiny_data.load(folder, *LINE, *options(paths, 2), "run.steps=3"), "small", 1) == 0
    return folder


def history(run: Path, step: int) -> list[dict[str, Any]]:
    return read_manifest(run / f"checkpoints/step_{step:08d}").history


def test_an_optimizer_that_changes_is_a_stage(tiny_data: TinyData, paths, run: Path, tmp_path: Path, capsys) -> None:
    """The same bits as a run in which it was planned, also when it goes on once more without asking."""
    new = ("optimizer.betas=[0.8,0.9]", "run.steps=6", *options(paths, 2))
    assert go_on(tiny_data, run, *new, "run.steps=5", allow="optimizer.betas") == 0
    out = capsys.readouterr().out
    assert "changed after step 3, as --allow-change permits: optimizer.betas [0.9, 0.95] -> [0.8, 0.9]\n" in out
    entry = {"step": 3, "key": "optimizer.betas", "from": [0.9, 0.95], "to": [0.8, 0.9]}
    assert history(run, 3) == [] and history(run, 4) == history(run, 5) == [entry]
    assert "'optimizer.betas'" in (run / "logs/rank_00.log").read_text()
    assert go_on(tiny_data, run, *new) == 0
    assert history(run, 6) == [entry] and "changed after" not in capsys.readouterr().out
    planned = "stages=[{until_step: 3, optimizer: {betas: [0.9, 0.95]}}]"
    assert launch(tiny_data.load(tmp_path / "planned", *LINE, *new, planned), "small", 1) == 0
    rows = [[repeating(row) for row in read_rows(each / "metrics.jsonl")] for each in (run, tmp_path / "planned")]
    assert rows[0] == rows[1] and len(rows[0]) == 6
    shards = [each / "checkpoints/step_00000006/shard_00000.safetensors" for each in (run, tmp_path / "planned")]
    assert shards[0].read_bytes() == shards[1].read_bytes()


def test_sources_and_batch_that_change(tiny_data: TinyData, paths, run: Path, capsys) -> None:
    """No window comes twice, and what earlier steps had is still known."""
    first, second = tiny_data.load(run, *LINE, *options(paths, 2)), tiny_data.load(run, *LINE, *options(paths, 3))
    new = ("batch.global=8", "run.steps=6")
    assert go_on(tiny_data, run, *options(paths, 3), *new, allow="data,batch.global") == 0
    keys = [change["key"] for change in history(run, 6)]
    assert keys == ["batch.global", "data.sources", "data"]
    rows = read_rows(run / "metrics.jsonl")
    assert [row["samples"] for row in rows] == [4, 8, 12, 20, 28, 36]
    assert [row["tokens"] for row in rows] == [32 * row["samples"] for row in rows]
    course = Course(load(str(run / "config.yaml")), history(run, 6))
    before, after = open_data(first).mixture, open_data(course.config, course).mixture
    assert open_data(second).mixture.locate(np.arange(36))[0].tolist() != after.locate(np.arange(36))[0].tolist()
    taken = [*zip(*(each.tolist() for each in before.locate(np.arange(12))), strict=True)]
    taken += [*zip(*(each.tolist() for each in after.locate(np.arange(12, 36))), strict=True)]
    assert len({*taken}) == 36, "no window twice"
    capsys.readouterr()
    for step, samples in ((2, range(4, 8)), (5, range(20, 28))):
        assert main(["data", "--run", str(run), "--step", str(step), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(dict.fromkeys(piece["sample"] for piece in found)) == list(samples)
        names = [["first", "second", "third"][source] for source, _ in taken[samples.start : samples.stop]]
        assert [next(p["source"] for p in found if p["sample"] == sample) for sample in samples] == names


def test_a_source_whose_files_are_gone(tiny_data: TinyData, paths, run: Path, tmp_path: Path) -> None:
    only = (f'data.sources=[{{"path": "{paths["second"]}", "name": "second"}}]', "data.train=null", "run.steps=5")
    gone = json.loads(options(paths, 2)[1].partition("=")[2])[0]["path"]
    moved = [Path(f"{gone}{end}").rename(tmp_path / f"away{end}") for end in (".bin", ".idx")]
    try:
        assert go_on(tiny_data, run, *only, allow="data.sources") == 0
    finally:
        for path in moved:
            path.rename(f"{gone}{path.suffix}")
    assert list(read_rows(run / "metrics.jsonl")[-1]["epochs"]) == ["second"]


def test_longer_windows_on_two_ranks(tiny_data: TinyData, paths, run: Path) -> None:
    new = (*options(paths, 2), "model.seq_len=64", "run.steps=5", "batch.micro=1")
    assert go_on(tiny_data, run, *new, allow="model.seq_len", nproc=2) == 0
    assert [row["tokens"] for row in read_rows(run / "metrics.jsonl")] == [128, 256, 384, 640, 896]
    assert [change["key"] for change in history(run, 5)] == ["model.seq_len", "data"]


def test_files_that_changed_in_place(tiny_data: TinyData, paths, run: Path, tmp_path: Path, capsys) -> None:
    other = IndexedDataset(paths["third"])
    assert other.num_documents
    sources = json.loads(options(paths, 2)[1].partition("=")[2])
    sources[0]["path"] = str(paths["third"])
    new = ("data.train=null", f"data.sources={json.dumps(sources)}", "run.steps=4")
    assert go_on(tiny_data, run, *new) == 1
    assert "or allow it with --allow-change data" in capsys.readouterr().err
    assert go_on(tiny_data, run, *new, allow="data") == 0
    assert [change["key"] for change in history(run, 4)] == ["data.sources", "data"]


def test_validation_sets_are_free(tiny_data: TinyData, paths, run: Path, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "held", np.uint16) as writer:
        writer.append(np.arange(200) % 7)
        writer.end_document()
    sets = json.dumps([{"path": str(tmp_path / "held"), "name": "w"}])
    assert go_on(tiny_data, run, *options(paths, 2), f"data.validation={sets}", "run.steps=4") == 0
    assert go_on(tiny_data, run, *options(paths, 2), "run.steps=5") == 0


def mix(paths: dict[str, Path], *sources: tuple[str, float, str]) -> list[dict[str, Any]]:
    """Sources: the name of a path, weight, name."""
    return [{"path": str(paths[path]), "weight": weight, "name": name} for path, weight, name in sources]


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([("first", 1.5, "first"), ("second", 2, "second")], "data.sources[first].weight 3.0 -> 1.5"),
        ([("first", 3, "first"), ("second", 2, "other")], "data.sources[other].path None -> {second}, "),
        pytest.param(
            [("first", 3, "first"), ("third", 2, "second")], "data.sources[second].path {second} -> {third}", marks=FULL
        ),
    ],
)
def test_another_mix_is_said_source_by_source(
    tiny_data: TinyData, paths, run: Path, sources, said: str, capsys
) -> None:
    new = ("data.train=null", f"data.sources={json.dumps(mix(paths, *sources))}", "run.steps=4")
    said = said.format(**paths)
    assert go_on(tiny_data, run, *new) == 1
    err = capsys.readouterr().err
    assert f"(saved -> this): {said}" in err and len(err) <= 301
    assert go_on(tiny_data, run, *new, allow="data") == 0
    assert f"changed after step 3, as --allow-change permits: {said}" in capsys.readouterr().out


def test_another_mix_of_a_stage_is_said(tiny_data: TinyData, paths, run: Path, capsys) -> None:
    stages = [{"until_step": 5, "data": {"sources": mix(paths, ("first", 1, "first"))}}]
    new = (*options(paths, 2), f"stages={json.dumps(stages)}", "run.steps=6")
    assert go_on(tiny_data, run, *new, allow="stages") == 0
    said = f"stages[0].until_step None -> 5, stages[0].data.sources[first].path None -> {paths['first']}, "
    assert f"as --allow-change permits: {said}" in capsys.readouterr().out
    stages[0]["data"]["sources"] = mix(paths, ("second", 1, "second"))
    assert go_on(tiny_data, run, *options(paths, 2), f"stages={json.dumps(stages)}", "run.steps=7", allow="stages") == 0
    said = f"stages[0].data.sources[second].path None -> {paths['second']}, "
    assert f"as --allow-change permits: {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "allow", "code", "line"),
    [
        (["optimizer.betas=[0.8,0.9]"], None, 1, "or allow it with --allow-change optimizer.betas"),
        (
            ["optimizer.betas=[0.8,0.9]", "batch.global=8"],
            "optimizer",
            1,
            "or allow it with --allow-change batch.global",
        ),
        (["optimizer.betas=[0.8,0.9]"], "data", 1, "MZ-412 "),
        (["stages=[{until_step: 2, batch: {global: 2}}]"], None, 1, "or allow it with --allow-change stages"),
        (["run.seed=3"], None, 1, "resume with the config it was made with\n"),
        (["model.dropout=0.5"], "data", 1, "resume with the config it was made with\n"),
        ([], "model.layers", 2, "MZ-123 --allow-change: model.layers cannot change: the weights have this shape"),
        ([], "optimizer.lrr", 2, "MZ-104 --allow-change: unknown key 'optimizer.lrr'; did you mean optimizer.lr?"),
        (["checkpoint.resume=none"], "data", 2, "MZ-100 train: --allow-change is for a resumed run; give "),
    ],
)
def test_refusals(tiny_data: TinyData, paths, run: Path, overrides, allow, code: int, line: str, capsys) -> None:
    assert go_on(tiny_data, run, *options(paths, 2), "run.steps=5", *overrides, allow=allow) == code
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1 and len(err) <= 301, err


def test_positions_that_were_learned_stay(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    line = ("model.position=learned", "run.steps=1")
    assert launch(tiny_data.load(tmp_path / "run", *LINE, *line), "small", 1) == 0
    new = ("model.position=learned", "run.steps=2", "model.seq_len=64")
    assert go_on(tiny_data, tmp_path / "run", *new, allow="model.seq_len") == 1
    err = capsys.readouterr().err
    assert "MZ-412 " in err and "model.seq_len 32 -> 64" in err and "--allow-change" not in err


def test_stages_that_change_behind_the_step(tiny_data: TinyData, paths, run: Path) -> None:
    """What is over keeps its samples: the new stages hold from the step on with which the run goes on."""
    stages = "stages=[{until_step: 4, batch: {global: 2}}, {until_step: 5, batch: {global: 6}}]"
    assert go_on(tiny_data, run, *options(paths, 2), "run.steps=6", stages, allow="stages") == 0
    assert [row["samples"] for row in read_rows(run / "metrics.jsonl")] == [4, 8, 12, 14, 20, 24]
    assert [change["key"] for change in history(run, 6)] == ["stages"]
