"""Three data sets of the tiny corpus, and the options that name them as sources."""

import json
from pathlib import Path

from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from tests.tiny_run import TinyData

NAMES, WEIGHTS = ("first", "second", "third"), (3, 2, 1)


def cut(tiny_data: TinyData, folder: Path) -> dict[str, Path]:
    """Deal the documents of the tiny data set to three data sets; return their paths by name."""
    whole, paths = IndexedDataset(tiny_data.train), {name: folder / name for name in NAMES}
    for part, path in enumerate(paths.values()):
        with IndexedDatasetWriter(path, whole.dtype) as writer:
            for document in range(part, whole.num_documents, len(paths)):
                writer.append(whole.read(*whole.bounds(document)))
                writer.end_document()
    return paths


def options(paths: dict[str, Path], number: int = len(NAMES)) -> tuple[str, ...]:
    """The options that mix the first few of them by weight."""
    each = list(zip(NAMES, WEIGHTS, strict=True))[:number]
    sources = [{"path": str(paths[name]), "weight": weight, "name": name} for name, weight in each]
    return "data.train=null", f"data.sources={json.dumps(sources)}"


def text_of(stream: TokenStream, start: int, length: int) -> list[tuple[int, int]]:
    """The (document, offset in it) of every token of a part of a stream."""
    return [stream.locate(position) for position in range(start, start + length)]
