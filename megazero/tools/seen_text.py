"""Find which text a step of a run saw, and in which steps a document was seen: both by the functions that chose it.

Nothing of it is recorded while a run trains. A step's samples name windows, and windows documents; the way back asks
every sample so far for its window. Both read the run's config.yaml and the token files that it names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megazero.base.errors import UserError
from megazero.base.terminal import in_columns
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.data.joined import JoinedDataset
from megazero.data.mixture import Source
from megazero.data.sampler import index_of
from megazero.data.token_dataset import TokenDataset
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.observe.jsonl import read_rows
from megazero.run.data import RunData, open_data, sources_of
from megazero.run.folder import RunFolder
from megazero.run.history import changes_of
from megazero.run.resume import manifests

_SHOWN = 48  # characters of a text in a table


def step_text(folder: RunFolder, step: int, rank: int | None) -> list[dict[str, Any]]:
    """Return the documents, or parts of them, that a step read, in the order of its samples.

    Each is {sample, source, shard, document, offset, tokens}, with `text` where the run has a tokenizer. A sample has
    as many as its window touches; `source` is null where the only one has no name, `offset` is in tokens of the
    document. `document` is counted in `shard`, if the source is a folder of shards; `shard` is null where it is not.

    Args:
        step: from 1.
        rank: only the samples that it computed, on the grid of the newest checkpoint; None: all.

    Raises:
        UserError: 113, no run is there; 100, no such step or rank; 402, there is no checkpoint to tell the grid.
    """
    folder.require_run()
    config = load(str(folder.config))
    if step > config.run.steps:
        raise UserError(100, f"--step {step}: the run has {config.run.steps:,} steps", where="data")
    course = [course for first, course in _course(folder, config).eras() if first < step][-1]
    part = course.part(step - 1)
    samples = course.samples(step - 1) + np.arange(part.config.batch.global_)
    if rank is not None:
        samples = samples[_of_rank(folder, part.config, rank)]
    data, path = open_data(part.config, course), config.data.tokenizer
    tokenizer = None if path is None else open_tokenizer(path, config.model.vocab)
    sources, windows = (each.tolist() for each in data.mixture.locate(samples))
    chosen = [data.mixture.sources[source] for source in sources]
    return [
        {"sample": sample} | part
        for sample, source, window in zip(samples.tolist(), chosen, windows, strict=True)
        for part in _parts(source, window, tokenizer=tokenizer)
    ]


def steps_of(folder: RunFolder, document: int, name: str | None, shard: str | None = None) -> list[dict[str, Any]]:
    """Return in which of the steps done so far a document was read, by step.

    Each is {step, sample, source, shard, document, offset, tokens}: which part of it was in that sample.

    Args:
        document: its number in the token files.
        name: of the source; may be None where there is one.
        shard: that holds it, where the source is a folder.

    Raises:
        UserError: 113, no run is there; 100, no such source or document; 122, the document is not trained on.
    """
    folder.require_run()
    config = load(str(folder.config))
    done, eras, found = _done(folder), _course(folder, config).eras(), list[dict[str, Any]]()
    known = [course for _, course in eras if name in [source.name for source in sources_of(course)]]
    newest = open_data((course := known[-1] if name is not None and known else eras[-1][1]).config, course)
    stream = newest.mixture.sources[_source(newest, name)].windows.stream
    document = _numbered(stream.dataset, document, shard)
    if stream.span(document) is None:
        what = f"document {document} is not trained on: it is empty, or held out by data.valid"
        raise UserError(122, what, where=stream.dataset.prefix)
    ends = [*(first for first, _ in eras[1:]), done]
    for (first, course), end in zip(eras, ends, strict=True):
        places = _places(course, name, stream.dataset.prefix) if first < end else []
        data = newest if course is newest.course or not places else open_data(course.config, course)
        for place in places:
            found += _sights(data, document, place, course.samples(first), course.samples(min(end, done)))
    return sorted(found, key=lambda each: (each["sample"], each["offset"]))


def _sights(data: RunData, document: int, source: int, first: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield each part of a document that samples `first` to `end` have read.

    Args:
        source: its place.
    """
    for mixture in data.mixtures.values():
        chosen = mixture.sources[source]
        span = chosen.windows.stream.span(document)
        assert span is not None, "the document is trained on"
        for sample, window in mixture.samples_of(source, chosen.windows.windows_of(*span), first, end):
            for part in _parts(chosen, window, document):
                yield {"step": data.course.step_of(sample), "sample": sample} | part


def _parts(
    source: Source, window: int, only: int | None = None, *, tokenizer: Tokenizer | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the documents of a window's input, {source, shard, document, offset, tokens}, with `text` by a tokenizer.

    Args:
        only: this document; None: all.
    """
    stream, dataset = source.windows.stream, source.windows.stream.dataset
    for document, offset, tokens in (part for span in source.windows.spans(window) for part in stream.parts(*span)):
        if only not in (None, document):
            continue
        shard, number = dataset.shard_of(document)
        found: dict[str, Any] = {"source": source.name, "shard": None if shard is dataset else shard.prefix.name}
        found |= {"document": number, "offset": offset, "tokens": tokens}
        if tokenizer is not None:
            first = dataset.bounds(document)[0] + offset
            found["text"] = tokenizer.decode(dataset.read(first, first + tokens).tolist())
        yield found


def _course(folder: RunFolder, config: Config) -> Course:
    """Return the course of a run: its config's, with the history that its newest checkpoint knows.

    Where the run has gone on from there with other options, and saved nothing yet, they have changed behind it.
    """
    store = Store(folder.checkpoints)
    manifest = next(manifests(store, store.steps()), None)
    if manifest is None or manifest.progress is None:
        return Course(config)
    return Course(config, [*manifest.history, *changes_of(manifest, config, None)])


def _numbered(dataset: TokenDataset, document: int, shard: str | None) -> int:
    """Return the number of a document among those of its source. Raises UserError 100: no such shard or document."""
    joined = isinstance(dataset, JoinedDataset)
    if joined != (shard is not None):
        what = f"has {len(dataset.names):,} shards, --shard is missing" if joined else "is no folder, leave --shard out"
        raise UserError(100, f"{dataset.prefix} {what}", where="data")
    number = dataset.document_of(shard, document) if joined and shard is not None else document
    if number is None or number >= dataset.num_documents:
        what = f"--document {document}: {dataset.prefix} has {dataset.num_documents:,} documents, "
        raise UserError(100, f"{what}or no such shard", where="data")
    return number


def _places(course: Course, name: str | None, files: Path) -> list[int]:
    """Return the places of the sources that are these files: the one of that name, or all where that is not one."""
    sources = sources_of(course)
    same = [place for place, source in enumerate(sources) if Path(source.path).resolve() == files.resolve()]
    return [place for place in same if sources[place].name == name] or same


def as_text(found: list[dict[str, Any]]) -> str:
    """Return what was found as a table, texts by their beginning; names only where there are some."""
    if not found:
        return "in no step so far"
    heads = tuple(head for head in found[0] if head != "text" and any(each[head] is not None for each in found))
    lines = in_columns([heads, *(tuple(_shown(each[head]) for head in heads) for each in found)])
    texts = ["", *(_shown(each.get("text", "")) for each in found)]
    return "\n".join(f"{line}  {text}".rstrip() for line, text in zip(lines, texts, strict=True))


def _shown(value: Any) -> str:
    if isinstance(value, str):
        text = ascii(value)[1:-1] if not value.isprintable() else value
        return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return "-" if value is None else str(value)


def _of_rank(folder: RunFolder, config: Config, rank: int) -> list[int]:
    """Return which sequences of a step a rank of the world computed: ranks are counted tensor, then data, fastest."""
    store = Store(folder.checkpoints)
    if not (steps := store.steps()):
        raise UserError(402, "no checkpoint yet that tells the grid", "leave --rank out", where=folder.checkpoints)
    grid = read_manifest(store.path(steps[0])).grid
    ranks, batch = grid["tensor"] * grid["data"] * grid["pipeline"], config.batch
    if rank >= ranks:
        raise UserError(100, f"--rank {rank}: the run has {ranks} ranks", where="data")
    data_rank, micro_batches = rank // grid["tensor"] % grid["data"], batch.global_ // (batch.rows * grid["data"])
    rows = range(batch.rows)
    return [index_of(data_rank, m, row, grid["data"], batch.rows) for m in range(micro_batches) for row in rows]


def _source(data: RunData, name: str | None) -> int:
    names = [source.name for source in data.mixture.sources]
    if name is None and len(names) == 1:
        return 0
    if name not in names:
        known = ", ".join(str(each) for each in names)
        what = "--source is missing" if name is None else f"--source {name}: no such source"
        raise UserError(100, f"{what}; expected one of {known}", where="data")
    return names.index(name)


def _done(folder: RunFolder) -> int:
    """Return how many steps the run has logged or saved."""
    rows = read_rows(folder.metrics) if folder.metrics.exists() else []
    return max([0, *(row["step"] for row in rows[-1:]), *Store(folder.checkpoints).steps()[:1]])
