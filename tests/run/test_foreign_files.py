"""Token files of other projects are copied into our format, and are the same text then."""

from pathlib import Path

import numpy as np
import pytest

from data_tools import merge
from megazero.__main__ import main
from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDataset
from tests.tiny_run import TinyData, all_tokens


@pytest.fixture(scope="module")
def others(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny data set as other projects have it."""
    folder = tmp_path_factory.mktemp("others")
    tokens, ends = all_tokens(tiny_data.train), IndexedDataset(tiny_data.train).offsets(1, 2**40)
    paths = {name: folder / name for name in ("web.ds", "web.npy", "web.bin")}
    for path in paths.values():
        path.write_bytes(tokens.astype("<u2").tobytes())
    Path(f"{paths['web.ds']}.index").write_bytes(ends.astype("<u8").tobytes())
    return paths


def merged(path: Path, output: Path, *words: str) -> int:
    return merge.main([str(path), "--output", str(output), *words])


@pytest.mark.parametrize("kind", ["web.ds", "web.npy", "web.bin"])
def test_a_copy_in_our_format_is_the_same_text(tiny_data: TinyData, others, tmp_path: Path, kind: str) -> None:
    """Its digest, by which a run goes on, is that of the pair; so its samples are."""
    assert merged(others[kind], tmp_path / "x", "--tokenizer", str(tiny_data.tokenizer)) == 0
    streams = [TokenStream(IndexedDataset(path)) for path in (tiny_data.train, tmp_path / "x")]
    assert streams[0].digest() == streams[1].digest()
    assert np.array_equal(all_tokens(tmp_path / "x"), all_tokens(tiny_data.train))


def test_training_names_the_command_that_copies(tiny_data: TinyData, others, tmp_path: Path, capsys) -> None:
    for path in others.values():
        line = [f"data.train={path}", f"run.dir={tmp_path / 'run'}"]
        assert main(["train", "--config", str(tiny_data.config), *line]) == 1
        err = capsys.readouterr().err
        assert err.startswith("MZ-201 ") and f"`megazero merge {path} --output PREFIX`" in err and err.count("\n") == 1
    assert merged(others["web.npy"], tmp_path / "x") == 1
    assert "MZ-222" in capsys.readouterr().err
