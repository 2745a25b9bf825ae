"""Validation sets by name: each with its own metrics, and none of their documents trained on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megazero.base.errors import UserError
from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.overlap import SHORTEST, shared_document
from megazero.observe.jsonl import read_rows
from megazero.observe.plot import draw_loss
from megazero.tools.training.launch import launch
from tests.chosen import Chosen
from tests.tiny_run import TinyData, train


def written(path: Path, documents: list[list[int]]) -> TokenStream:
    with IndexedDatasetWriter(path, np.uint16) as writer:
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()
    dataset = IndexedDataset(path)
    return TokenStream(dataset)


def document(first: int, length: int = 80) -> list[int]:
    return [(first * 7 + i * i) % 390 for i in range(length)]


def held_out(folder: Path) -> dict[str, Path]:
    for name, first in (("one", 1000), ("two", 2000)):
        written(folder / name, [document(first + d) for d in range(3)])
    return {name: folder / name for name in ("one", "two")}


def test_each_set_has_its_own_metrics(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """The same as a run that has the set as its only one, and the same weights as without any."""
    paths = held_out(tmp_path)
    sets = json.dumps([{"path": str(paths["one"])}, {"path": str(paths["two"]), "name": "other"}])
    options = ("data.valid=0.1", "data.valid_every=2", f"data.validation={sets}")
    assert launch(tiny_data.load(tmp_path / "run", *options), "small", 1) == 0
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    keys = [key for key in rows[1] if key.startswith("valid")]
    assert keys == [f"{key}{name}" for name in ("", ".one", ".other") for key in ("valid_loss", "valid_bits_per_byte")]
    assert not any(key.startswith("valid") for key in rows[0]) and all(math.isfinite(rows[3][key]) for key in keys)
    out = capsys.readouterr().out
    assert f"valid {rows[3]['valid_loss']:.4f}  valid.one {rows[3]['valid_loss.one']:.4f}  valid.other " in out
    assert f"validation loss of other {rows[3]['valid_loss.other']:.4f} nats per token" in out
    alone = train(tiny_data.load(tmp_path / "alone", f"data.valid={paths['two']}"))
    with_other = train(tiny_data.load(tmp_path / "with", "data.valid=null", f"data.validation={sets}"))
    assert with_other.rows[-1]["valid_loss.other"] == alone.rows[-1]["valid_loss"]
    assert with_other.column("loss") == alone.column("loss")
    draw_loss(rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_document_that_is_trained_on_is_refused(tiny_data: TinyData, tmp_path: Path) -> None:
    whole = IndexedDataset(tiny_data.train)
    number = int(np.argmax(np.diff(whole.offsets(0, whole.num_documents + 1))))
    bounds = whole.bounds(number)
    written(tmp_path / "copy", [document(5), whole.read(*bounds).tolist(), document(6)])
    options = ("data.valid=null", f"data.validation=[{{path: {tmp_path / 'copy'}}}]")
    with pytest.raises(UserError, match=rf"MZ-220 .*document 1 of validation set copy .* it is document {number:,} of"):
        launch(tiny_data.load(tmp_path / "run", *options), "small", 1)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_shared_documents(tmp_path: Path) -> None:
    short, near = document(3, SHORTEST - 1), [*document(4)[:-1], 7]
    training = written(tmp_path / "a", [document(d) for d in range(40)] + [short, document(4, 81)])
    for documents, expected in [
        ([document(50), document(17)], (17, 1)),
        ([document(50), short], None),
        ([near], None),
        ([document(4, 81), [*document(4)[:70], *document(5)[:11]]], (41, 0)),
        ([document(4, 82)], None),
        ([document(4, 81)], (41, 0)),
    ]:
        assert shared_document(training, written(tmp_path / "b", documents)) == expected


def test_only_chosen_documents_count(tmp_path: Path) -> None:
    whole = written(tmp_path / "a", [document(d) for d in range(10)]).dataset
    even, odd = (TokenStream(whole, Chosen(np.arange(first, 10, 2))) for first in (0, 1))
    assert shared_document(even, odd) is None and shared_document(odd, odd) == (1, 1)
