"""What `megazero data` says of a step is what the loader reads, and the way back finds every sight of a document."""

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.__main__ import main
from megazero.config.file import load
from megazero.data.loader import BatchLoader
from megazero.data.tokenizer import open_tokenizer
from megazero.run.data import open_data
from megazero.run.folder import RunFolder
from megazero.tools.seen_text import as_text
from megazero.tools.training.launch import launch
from tests.sources import cut, options
from tests.tiny_run import TinyData


@pytest.fixture(scope="module")
def run(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of 20 steps on three sources, of which it goes through some more than once."""
    folder = RunFolder(tmp_path_factory.mktemp("seen") / "run")
    mixed = options(cut(tiny_data, tmp_path_factory.mktemp("sources")))
    config = tiny_data.load(folder.path, *mixed, "run.steps=20", "batch.global=24", "model.layers=1", "data.valid=0.2")
    assert launch(config, "small", 1) == 0
    return folder


def asked(capsys: pytest.CaptureFixture[str], folder: RunFolder, *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["data", "--run", str(folder.path), "--json", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize("step", [1, 9, 20])
def test_a_step_is_what_the_loader_reads(run: RunFolder, tiny_data: TinyData, step: int, capsys) -> None:
    config = load(str(run.config))
    loader = BatchLoader(open_data(config).mixture, global_batch=24, micro_batch=2)
    tokenizer = open_tokenizer(tiny_data.tokenizer)
    found = asked(capsys, run, "--step", str(step))
    for batch in loader.step(step - 1):
        for b, sample in enumerate(batch.sample_ids_B.tolist()):
            parts = [part for part in found if part["sample"] == sample]
            assert sum(part["tokens"] for part in parts) == 32
            ids, at = batch.tokens_SB[:, b].tolist(), 0
            for part in parts:
                assert part["text"] == tokenizer.decode(ids[at : at + part["tokens"]])
                assert part["source"] in ("first", "second", "third")
                at += part["tokens"]
    loader.close()
    assert list(dict.fromkeys(part["sample"] for part in found)) == list(range(24 * step - 24, 24 * step))
    assert asked(capsys, run, "--step", str(step), "--rank", "0") == found


def test_text_for_people(run: RunFolder, capsys) -> None:
    capsys.readouterr()
    assert main(["data", "--run", str(run.path), "--step", "3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["sample", "source", "document", "offset", "tokens"] and rows[0].split()[0] == "48"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--step", "21"], "MZ-100 data: --step 21: the run has 20 steps"),
        (["--step", "1", "--rank", "1"], "MZ-100 data: --rank 1: the run has 1 ranks"),
    ],
)
def test_refusals(run: RunFolder, words: list[str], line: str, capsys) -> None:
    assert main(["data", "--run", str(run.path), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and err.count("\n") == 1


def test_no_run(tmp_path: Path, capsys) -> None:
    assert main(["data", "--run", str(tmp_path), "--step", "1"]) == 2
    assert capsys.readouterr().err.startswith("MZ-113 ")


def test_a_rank_of_a_grid(run: RunFolder, tmp_path: Path, capsys, monkeypatch) -> None:
    """Ranks are counted tensor fastest, then data, then pipeline; together the data ranks read the step."""
    from megazero.tools import seen_text

    class Grid:
        grid = {"tensor": 2, "data": 3, "pipeline": 2}  # noqa: RUF012

    monkeypatch.setattr(seen_text, "read_manifest", lambda path: Grid)
    whole = asked(capsys, run, "--step", "5")
    ranks = [asked(capsys, run, "--step", "5", "--rank", str(rank)) for rank in range(12)]
    assert ranks[0] == ranks[1] == ranks[6] != ranks[2]
    assert sorted(part["sample"] for rank in (0, 2, 4) for part in ranks[rank]) == [part["sample"] for part in whole]
    assert ranks[2][0]["sample"] == 96 + 2, "of 24 sequences, two a micro-batch"


def test_a_rank_that_read_nothing_in_a_step() -> None:
    """As after a resume with more data ranks than the step had micro-batches."""
    assert as_text([]) == "this rank has read nothing in that step"
