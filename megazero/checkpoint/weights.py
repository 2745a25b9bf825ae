"""Read whole weights from a checkpoint of any grid into one process, to generate or to export."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import WEIGHT, Manifest
from megazero.checkpoint.pieces import Piece, ShardState
from megazero.checkpoint.shard import DTYPES
from megazero.checkpoint.store import Store
from megazero.plan.optimizers import AVERAGE

T = TypeVar("T")


def newest_whole(store: Store, read: Callable[[Path], T], warn: Callable[[str], object]) -> T:
    """Return the result of `read` for the folder of the newest step that it can read without damage.

    Args:
        warn: called for each newer, damaged step.

    Raises:
        UserError: 402, there is no checkpoint; 410, all are damaged; other errors of `read`.
    """
    steps = store.steps()
    for step in steps:
        try:
            return read(store.path(step))
        except UserError as error:
            if error.code != 410 or step == steps[-1]:
                raise
            warn(f"{error}; using an older step")
    raise UserError(402, "no checkpoint here", "give --run the folder of a run that has saved one", where=store.folder)


def with_averages(manifest: Manifest, where: Path) -> Manifest:
    """Return a manifest in which averages and weights have changed places. Raises UserError 402: there are none."""
    if AVERAGE not in manifest.kinds:
        raise UserError(402, "holds no averages", "train with optimizer.average.kind=ema", where=where)
    other = {WEIGHT: AVERAGE, AVERAGE: WEIGHT}

    def exchanged(kinds: list[str]) -> list[str]:
        return [other.get(kind, kind) for kind in kinds]

    tensors = {
        name: own if own.kinds is None else own.model_copy(update={"kinds": exchanged(own.kinds)})
        for name, own in manifest.tensors.items()
    }
    return manifest.model_copy(update={"kinds": exchanged(manifest.kinds), "tensors": tensors})


def require_shapes(manifest: Manifest, shapes: Mapping[str, list[int]], folder: Path) -> None:
    """Refuse a checkpoint of another model. Raises UserError 404, which names the first parameter that differs."""
    if odd := manifest.other_shape(shapes):
        what = f"{odd}: expected shape {shapes.get(odd, 'none')}, got {manifest.shapes.get(odd, 'none')}"
        raise UserError(404, what, "check that config.yaml is the run's own", where=folder)


def read_weights(folder: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the named parameters of a checkpoint, whole. Raises UserError 410 if a file is damaged."""
    flat = {n: torch.empty(manifest.tensors[n].numel, dtype=DTYPES[manifest.dtype_of(n)]) for n in names}
    holdings = [ShardState([Piece(name, 0, len(values), 0)], {WEIGHT: values}) for name, values in flat.items()]
    load_tensors(folder, manifest, holdings)
    return {name: values.view(manifest.tensors[name].shape) for name, values in flat.items()}
