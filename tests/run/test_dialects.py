"""A run on token files of another kind is the run on the same text as Megatron's pair, bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_tools import inspect, merge
from megazero.__main__ import main
from megazero.data.indexed_dataset import IndexedDataset
from megazero.observe.jsonl import read_rows
from tests.tiny_run import TinyData, all_tokens, repeating, train


@pytest.fixture(scope="module")
def others(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny data set as other projects have it."""
    folder = tmp_path_factory.mktemp("others")
    tokens, ends = all_tokens(tiny_data.train), IndexedDataset(tiny_data.train).document_offsets[1:]
    paths = {name: folder / name for name in ("web.ds", "web.npy", "web.bin")}
    for path in paths.values():
        path.write_bytes(tokens.astype("<u2").tobytes())
    Path(f"{paths['web.ds']}.index").write_bytes(ends.astype("<u8").tobytes())
    return paths


@pytest.fixture(scope="module")
def expected(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return [repeating(row) for row in train(tiny_data.load(tmp_path_factory.mktemp("pair") / "run")).rows]


@pytest.mark.parametrize("kind", ["web.ds", "web.npy", "web.bin"])
def test_a_run_has_the_same_rows(tiny_data: TinyData, others, expected, tmp_path: Path, kind: str) -> None:
    """Also its validation loss, on the same documents held out."""
    rows = [repeating(row) for row in train(tiny_data.load(tmp_path / "run", f"data.train={others[kind]}")).rows]
    assert rows == expected and np.isfinite(rows[-1]["valid_loss"])


def test_tools_read_every_kind(tiny_data: TinyData, others, tmp_path: Path, capsys) -> None:
    found = []
    for path in (tiny_data.train, *others.values()):
        line = [str(path), "--tokenizer", str(tiny_data.tokenizer), "--document", "3", "--json"]
        assert inspect.main(line) == 0
        found.append(json.loads(capsys.readouterr().out))
        del found[-1]["prefix"]
    assert found[1:] == found[:1] * 3
    inputs, output = [str(path) for path in others.values()], tmp_path / "all"
    assert merge.main([*inputs, "--tokenizer", str(tiny_data.tokenizer), "--output", str(output)]) == 0
    assert np.array_equal(all_tokens(output), np.tile(all_tokens(tiny_data.train), 3))
    assert merge.main([*inputs, "--output", str(output)]) == 1
    assert "MZ-222" in capsys.readouterr().err


def test_which_text_a_step_had(tiny_data: TinyData, others, tmp_path: Path, capsys) -> None:
    found = []
    for name, path in (("pair", tiny_data.train), ("other", others["web.npy"])):
        folder = tmp_path / name
        train(config := tiny_data.load(folder, f"data.train={path}"))
        (folder / "config.yaml").write_text(tiny_data.config.read_text().replace(str(tiny_data.train), str(path)))
        assert config.data.train == str(path) and len(read_rows(folder / "metrics.jsonl")) == 4
        capsys.readouterr()
        assert main(["data", "--run", str(folder), "--step", "2", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_a_tokenizer_is_asked_for_before_anything_starts(tiny_data: TinyData, others, tmp_path: Path, capsys) -> None:
    line = [f"data.train={others['web.npy']}", "data.tokenizer=null", f"run.dir={tmp_path / 'run'}"]
    assert main(["train", "--config", str(tiny_data.config), *line]) == 1
    err = capsys.readouterr().err
    assert err.startswith("MZ-222 ") and err.count("\n") == 1 and not (tmp_path / "run").exists()
