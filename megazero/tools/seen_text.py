"""Find the text that a step of a run saw, with the functions that chose it.

A run does not record its text: a step's samples determine windows, and windows determine documents. The search reads
the run's config.yaml and the token files named there.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from megazero.base.errors import UserError
from megazero.base.terminal import in_columns
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.data.mixture import Source
from megazero.data.sampler import index_of
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.run.data import open_data
from megazero.run.folder import RunFolder
from megazero.run.history import changes_of
from megazero.run.resume import manifests

_SHOWN = 48  # characters of a text in a table


def step_text(folder: RunFolder, step: int, rank: int | None) -> list[dict[str, Any]]:
    """Return the documents, or parts of them, that a step read, in the order of its samples.

    Each is {sample, source, shard, document, offset, tokens}, with `text` if the run has a tokenizer. A sample has one
    for each document that its window touches. `source` is null if the only source has no name; `offset` is in tokens of
    the document. `document` counts within `shard` if the source is a folder of shards; otherwise `shard` is null.

    Args:
        step: number of the step, from 1.
        rank: return only the samples that this rank computed, on the grid of the newest checkpoint; None: all.

    Raises:
        UserError: 113, the folder is not a run; 100, no such step or rank; 402, no checkpoint gives the grid;
            the errors of `open_data` and `open_tokenizer`.
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
        for part in _parts(source, window, tokenizer)
    ]


def _parts(source: Source, window: int, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """Yield the documents of a window's input, with `text` if there is a tokenizer."""
    stream, dataset = source.windows.stream, source.windows.stream.dataset
    for document, offset, tokens in (part for span in source.windows.spans(window) for part in stream.parts(*span)):
        shard, number = dataset.shard_of(document)
        found: dict[str, Any] = {"source": source.name, "shard": None if shard is dataset else shard.prefix.name}
        found |= {"document": number, "offset": offset, "tokens": tokens}
        if tokenizer is not None:
            first = dataset.bounds(document)[0] + offset
            found["text"] = tokenizer.decode(dataset.read(first, first + tokens).tolist())
        yield found


def _course(folder: RunFolder, config: Config) -> Course:
    """Return the course of a run: that of its config, with the history in its newest checkpoint.

    If the run was resumed from there with other options and has saved nothing yet, append these changes to the history.
    """
    store = Store(folder.checkpoints)
    manifest = next(manifests(store, store.steps()), None)
    if manifest is None or manifest.progress is None:
        return Course(config)
    return Course(config, [*manifest.history, *changes_of(manifest, config, None)])


def as_text(found: list[dict[str, Any]]) -> str:
    """Return the documents as a table, with the beginning of each text; leave out columns without values."""
    if not found:
        return "this rank has read nothing in that step"
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
    """Return the positions in a step's global batch, from 0, of the sequences that a rank of the world computed.

    Ranks count tensor ranks fastest, then data. Raises UserError: 402, no checkpoint gives the grid; 100, no such rank.
    """
    store = Store(folder.checkpoints)
    if not (steps := store.steps()):
        raise UserError(402, "no checkpoint yet that records the grid", "leave --rank out", where=folder.checkpoints)
    grid = read_manifest(store.path(steps[0])).grid
    ranks, batch = grid["tensor"] * grid["data"] * grid["pipeline"], config.batch
    if rank >= ranks:
        raise UserError(100, f"--rank {rank}: the run has {ranks} ranks, counted from 0", where="data")
    data_rank, micro_batches = rank // grid["tensor"] % grid["data"], batch.global_ // (batch.rows * grid["data"])
    rows = range(batch.rows)
    return [index_of(data_rank, m, row, grid["data"], batch.rows) for m in range(micro_batches) for row in rows]
