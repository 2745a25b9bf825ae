"""Runs on several sources: the same text on every grid and after every restart, its repeats counted, limits held."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megazero.base.errors import UserError
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.data.loader import BatchLoader
from megazero.observe.jsonl import read_rows
from megazero.run.data import open_data
from megazero.run.folder import RunFolder
from megazero.tools.certify.tolerances import LOSS_FP32, difference
from megazero.tools.training.launch import launch
from tests.sources import NAMES, WEIGHTS, cut, options, text_of
from tests.tiny_run import TinyData, command, repeating, saved_bytes, train

GRIDS = [(1, 4), (1, 1), (2, 2), (2, 1), (4, 1), (1, 2)]  # data ranks, micro-batch


@pytest.fixture(scope="module")
def mixed(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return options(cut(tiny_data, tmp_path_factory.mktemp("sources")))


def seen(tiny_data: TinyData, folder: Path, mixed: tuple[str, ...], ranks: int, micro: int) -> dict[int, list]:
    """Of each sample id of 12 steps the (source, document, offset) of every token that a grid reads."""
    mixture = open_data(tiny_data.load(folder, *mixed, "data.valid=null")).mixture
    found: dict[int, list] = {}
    for rank in range(ranks):
        loader = BatchLoader(mixture, global_batch=4, micro_batch=micro, data_rank=rank, num_data=ranks)
        for step in range(12):
            for batch in loader.step(step):
                ids = batch.sample_ids_B.numpy()
                for b, (id_, source, window) in enumerate(zip(ids.tolist(), *mixture.locate(ids), strict=True)):
                    chosen = mixture.sources[source]
                    text = text_of(chosen.windows.stream, 32 * int(window), 32)
                    assert id_ not in found
                    found[id_] = [(chosen.name, *place) for place in text]
                    assert batch.tokens_SB[:, b].tolist() == [
                        int(chosen.windows.stream.dataset.read(at, at + 1)[0])
                        for at in (chosen.windows.stream.dataset.bounds(d)[0] + o for d, o in text)
                    ]
        loader.close()
    return found


def test_six_grids_read_the_same_documents(tiny_data: TinyData, mixed, tmp_path: Path) -> None:
    whole, *others = (seen(tiny_data, tmp_path, mixed, *grid) for grid in GRIDS)
    assert sorted(whole) == list(range(48)) and all(other == whole for other in others)
    counts = [sum(text[0][0] == name for text in whole.values()) for name in NAMES]
    assert counts == [48 * weight // sum(WEIGHTS) for weight in WEIGHTS]


OPTIONS = ("run.steps=6", "checkpoint.every=1", "data.valid=0.2", "data.valid_samples=4", "model.dropout=0.1")


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param((), marks=pytest.mark.full),
        ("--nproc", "2", "batch.micro=1", "zero.stage=2"),
        pytest.param(("--nproc", "4", "batch.micro=1", "zero.stage=3"), marks=pytest.mark.full),
        pytest.param(("parallel.tensor=2", "parallel.sequence=true"), marks=pytest.mark.full),
        pytest.param(("parallel.pipeline=2", "batch.micro=1"), marks=pytest.mark.full),
        pytest.param(("--nproc", "4", "parallel.pipeline=2", "batch.micro=1", "zero.stage=2"), marks=pytest.mark.full),
    ],
    ids=lambda grid: " ".join(grid) or "one",
)
def test_a_restart_on_another_grid_goes_on_with_the_same_text(
    tiny_data: TinyData, mixed, tmp_path: Path, grid: tuple[str, ...], capsys
) -> None:
    whole = train(tiny_data.load(tmp_path / "whole", *OPTIONS, *mixed))
    line = ("train.py", "--config", tiny_data.config, *OPTIONS, *mixed, f"run.dir={tmp_path / 'run'}")
    first = launch(tiny_data.load(tmp_path / "run", *OPTIONS, *mixed, "run.steps=3", "schedule.decay=constant"), "s", 1)
    assert first == 0
    if not grid:  # the same grid is the same bits
        assert launch(tiny_data.load(tmp_path / "same", *OPTIONS, *mixed), "s", 1) == 0
        for step in (4, 5, 6):
            (tmp_path / f"same/checkpoints/step_{step:08d}").rename(tmp_path / str(step))
        assert launch(tiny_data.load(tmp_path / "same", *OPTIONS, *mixed, "checkpoint.resume=auto"), "s", 1) == 0
        assert [repeating(row) for row in read_rows(tmp_path / "same/metrics.jsonl")] == [
            repeating(row) for row in whole.rows
        ]
        return
    done = command(*line, *grid, "schedule.decay=constant", "checkpoint.resume=auto")
    assert (done.returncode, done.stderr) == (0, "")
    alone = train(tiny_data.load(tmp_path / "alone", *OPTIONS, *mixed, "schedule.decay=constant"))
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [(row["samples"], row["epochs"]) for row in rows] == [(row["samples"], row["epochs"]) for row in alone.rows]
    assert difference([row["loss"] for row in rows], alone.column("loss")) <= LOSS_FP32
    for name in NAMES:
        assert abs(rows[-1][f"valid_loss.{name}"] - alone.rows[-1][f"valid_loss.{name}"]) <= 1e-5


def test_what_a_run_says_of_its_sources(tiny_data: TinyData, mixed, tmp_path: Path, capsys) -> None:
    assert launch(tiny_data.load(tmp_path / "run", *mixed, "data.valid=null"), "small", 1) == 0
    out = capsys.readouterr().out
    assert "data first 50 %, second 33.33 %, third 16.67 %; of first (" in out and " epochs), second (" in out
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    mixture = open_data(tiny_data.load(tmp_path / "run", *mixed, "data.valid=null")).mixture
    for row in rows:
        counts = mixture.counts(row["samples"])
        sizes = [source.windows.num_windows for source in mixture.sources]
        assert list(row["epochs"].values()) == [count / size for count, size in zip(counts, sizes, strict=True)]
        assert row["epoch"] == row["samples"] / sum(sizes)


def test_other_weights_are_other_data(tiny_data: TinyData, mixed, tmp_path: Path, capsys) -> None:
    assert launch(tiny_data.load(tmp_path / "run", *mixed, "run.steps=2"), "small", 1) == 0
    before = saved_bytes(RunFolder(tmp_path / "run"))
    other = [option.replace('"weight": 3', '"weight": 4') for option in mixed]
    assert other != list(mixed)
    with pytest.raises(UserError, match=r"MZ-412 .*: data.sources\[first\].weight 3.0 -> 4.0; resume with"):
        launch(tiny_data.load(tmp_path / "run", *other, "checkpoint.resume=auto"), "small", 1)
    assert saved_bytes(RunFolder(tmp_path / "run")) == before
    manifest = read_manifest(Store(tmp_path / "run/checkpoints").path(2))
    assert json.loads(json.dumps(manifest.config["data.sources"]))[0]["weight"] == 3.0


def test_one_path_under_two_names(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """Each name goes through the file by itself; what a cap sees of one is half of what its text comes."""
    sources = [{"path": str(tiny_data.train), "name": name} for name in ("one", "two")]
    mixed = ("data.train=null", f"data.sources={json.dumps(sources)}", "data.valid=null", "run.steps=1")
    assert launch(tiny_data.load(tmp_path / "run", *mixed), "small", 1) == 0
    assert re.search(r"of one \((\S+), (\S+) epochs\), two \(\1, \2 epochs\)", capsys.readouterr().out)


def test_the_same_file_by_either_option_is_the_same_run_but_for_its_order(tiny_data: TinyData, tmp_path: Path) -> None:
    plain = open_data(tiny_data.load(tmp_path)).mixture
    named = open_data(tiny_data.load(tmp_path, *options(dict.fromkeys(NAMES, tiny_data.train)))).mixture
    assert {source.windows.num_windows for source in named.sources} == {plain.num_windows}
    ids = np.arange(20)
    assert plain.locate(ids)[1].tolist() != named.locate(ids)[1].tolist()


def test_a_cap_on_repeats(tiny_data: TinyData, mixed, tmp_path: Path) -> None:
    config = tiny_data.load(tmp_path / "run", *mixed, "data.max_epochs=1.5", "run.steps=2000")
    with pytest.raises(UserError, match=r"MZ-219 .*first: 2,000 steps read first \d+\.?\d* times, .* is 1.5; "):
        launch(config, "small", 1)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert open_data(tiny_data.load(tmp_path, *mixed, "data.max_epochs=1.5")).mixture.num_windows
