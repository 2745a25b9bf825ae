"""Small data sets and a small tokenizer for the tests of the data room."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_tools import train_tokenizer
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.tokenizer import Tokenizer, open_tokenizer

Make = Callable[..., IndexedDataset]


@pytest.fixture
def make_dataset(tmp_path: Path) -> Make:
    """make_dataset([[1, 2], [3]], dtype) -> the opened data set of these documents."""

    def make(documents: list[list[int]], dtype: type[np.integer] = np.uint16, name: str = "set") -> IndexedDataset:
        with IndexedDatasetWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.append(np.array(document))
                writer.end_document()
        return IndexedDataset(tmp_path / name)

    return make


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """400 pieces, trained on two modules of the standard library."""
    import argparse
    import textwrap

    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    sources = [str(module.__file__) for module in (argparse, textwrap)]
    assert train_tokenizer.main(["--input", *sources, "--output", str(path), "--vocab", "400"]) == 0
    return open_tokenizer(path)
