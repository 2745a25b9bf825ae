"""Choose what of a run its checkpoints hold.

They hold the state of the engine as pieces of parameters, and in the manifest everything that is no tensor. Sees the
config, as build/assemble.py does.
"""

import contextlib
import logging
import math
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megazero.base.errors import UserError
from megazero.base.files import flush_file
from megazero.base.version import __version__
from megazero.build.assemble import Built
from megazero.checkpoint.checkpoints import Checkpoints
from megazero.checkpoint.manifest import FORMAT, WEIGHT, Logical, Manifest, WrittenShard
from megazero.checkpoint.pieces import ShardState, holding_to_load, holding_to_save
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.retention import retire
from megazero.checkpoint.save import Saver
from megazero.checkpoint.shard import BLOCK, NAMES
from megazero.checkpoint.store import Store
from megazero.comm.grid import Grid
from megazero.config.changes import in_json
from megazero.config.file import flatten
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.data.tokenizer import Tokenizer
from megazero.launcher.signals import Signals
from megazero.model.parameter import whole_shapes
from megazero.observe.sinks import warn
from megazero.run.folder import RunFolder
from megazero.run.history import other_data
from megazero.run.lock import RunLock, State
from megazero.run.resume import ResumePoint


def shapes_of(built: Built) -> dict[str, list[int]]:
    """Return the whole shape of every parameter of the model."""
    return whole_shapes(built.model)


def holdings_to_save(built: Built) -> list[ShardState]:
    """Return what only this rank saves: its share of every unit, on the device or the host."""
    return [
        holding_to_save(unit, built.engine.optimizer.state[unit], _numel(built))
        for unit in built.engine.units
        if unit.axes.copies.rank == 0  # the first rank of the pipeline has it too
    ]


def holdings_to_load(built: Built) -> list[ShardState]:
    """Return what this rank updates: the tensors to load, from which the rest follows."""
    return [holding_to_load(u, built.engine.optimizer.state[u], _numel(built)) for u in built.engine.units]


def _numel(built: Built) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in shapes_of(built).items()}


@dataclass(frozen=True)
class Identity:
    """The digests of what a run reads; None for no tokenizer."""

    data: str
    tokenizer: str | None

    @classmethod
    def of(cls, data: str, tokenizer: Tokenizer | None) -> "Identity":
        """Return the identity of the windows' place in the files, not of every token, and of the tokenizer's file.

        Args:
            data: the digest of the former.
        """
        return cls(data, tokenizer.fingerprint if tokenizer is not None else None)


@dataclass(frozen=True)
class RunContext:
    """The folder, lock and signals of the job that trains.

    Attributes:
        folder: the run's.
        lock: the lock of that folder; rank 0 holds it.
        job: what all ranks know of it.
        signals: that have come to this rank.
    """

    folder: RunFolder
    lock: RunLock
    job: ResumePoint
    signals: Signals


@dataclass(frozen=True)
class CheckpointMetadata:
    """The part of the manifest that is the same in every checkpoint of a run.

    Attributes:
        run: its id.
        shapes: the whole shape of every parameter.
        dtype: the type of the optimizer's parameters and state.
        kinds: of values: the weight, and the optimizer's state.
        history: of the options that were changed when the run went on (`run/history.py`).
    """

    run: str
    config: Config
    grid: Grid
    shapes: Mapping[str, list[int]]
    dtype: torch.dtype
    kinds: tuple[str, ...]
    identity: Identity
    history: list[dict[str, Any]] = field(default_factory=list)

    def manifest(self, step: int, progress: Progress, parts: Sequence[WrittenShard]) -> Manifest:
        """Return the whole manifest of a step, of what all ranks have written."""
        config, grid = self.config, self.grid
        tensors: dict[str, list[list[int]]] = {name: [] for name in self.shapes}
        for part in parts:
            for name, pieces in part.tensors.items():
                tensors[name] += pieces
        assert config.zero.stage is not None, "a resolved config"
        sizes = {name: grid[name].size for name in ("tensor", "pipeline", "data")}
        return Manifest(
            format=FORMAT,
            run=self.run,
            step=step,
            grid={**sizes, "stage": config.zero.stage},
            dtype=NAMES[self.dtype],
            kinds=list(self.kinds),
            tensors={n: Logical(shape=s, pieces=sorted(tensors[n], key=_by_start)) for n, s in self.shapes.items()},
            block=BLOCK,
            files=[part.shard for part in parts],
            progress=progress,
            random={"seed": config.run.seed, "of": "seed, step, sample, layer, site and position; no state"},
            identity={"data": self.identity.data, "tokenizer": self.identity.tokenizer},
            config=plain(config),
            software={"megazero": __version__, "torch": torch.__version__, "python": platform.python_version()},
            history=self.history,
        )


def about_run(config: Config, built: Built, grid: Grid, site: RunContext, identity: Identity) -> CheckpointMetadata:
    """Return what every manifest of this run says alike."""
    dtype, kinds = built.engine.units[0].masters.dtype, (WEIGHT, *built.engine.optimizer.STATE)
    history = [*site.job.history, *other_data(site.job, identity.data)]
    return CheckpointMetadata(site.job.run, config, grid, shapes_of(built), dtype, kinds, identity, history)


def checkpoints_of(
    config: Config, built: Built, grid: Grid, device: torch.device, about: CheckpointMetadata, site: RunContext
) -> Checkpoints:
    """Return what saves this rank's part of the run; rank 0 commits."""
    store = Store(site.folder.checkpoints, site.job.word)
    options, log = config.checkpoint, logging.getLogger("megazero")

    def conclude(step: int, progress: Progress, parts: list[WrittenShard]) -> None:
        manifest = about.manifest(step, progress, parts)
        _require_ours(site, step)
        with contextlib.suppress(OSError):
            flush_file(site.folder.metrics)  # after a power cut too, the rows before a step are there if the step is
        log.info("saved %s", store.commit(step, manifest.to_bytes()))

    def tidy(stop: Callable[[], bool]) -> None:
        if options.keep is not None and site.lock.held:
            retire(store, options.keep, warn, stop)

    first = grid["world"].rank == 0
    saver = Saver(
        store,
        holdings_to_save(built),
        rank=grid["world"].rank,
        size=grid["world"].size,
        snapshot=options.async_,
        conclude=conclude if first else None,
        tidy=tidy if first else None,
    )
    grid.comm.ledger.hold("checkpoint", saver.copy_bytes)
    return Checkpoints(saver, grid["world"], device, every=options.every, background=options.async_)


def _require_ours(site: RunContext, step: int) -> None:
    """Refuse to commit into a folder that is gone, or is not this job's any more.

    Raises:
        UserError: 423, the folder was deleted, moved or made read-only; 421, it is another job's.
    """
    path = site.folder.path
    if (fault := site.folder.fault()) is not None:
        do = "mend that (earlier checkpoints went along with it), and go on with checkpoint.resume=auto"
        raise UserError(423, f"checkpoint not saved: {fault}", do, where=path, step=step)
    state = site.lock.state
    if state is State.GONE:
        what = "the lock was removed while this job trained: by hand, or another job has come and gone"
        raise UserError(421, what, "see that one job trains here, and go on with checkpoint.resume=auto", where=path)
    if state is State.ANOTHERS:
        what = "another job has taken this folder over: the lock was not renewed in time"
        raise UserError(421, what, "see what held this job up", where=path, step=step)


def check_space(config: Config, about: CheckpointMetadata, folder: Path) -> None:
    """Refuse a run whose checkpoints would not fit: it would find out when it has something to lose.

    Raises:
        UserError: 403, there is not room for one, or with several for two; 401, the disk does not answer.
    """
    elements = sum(math.prod(shape) for shape in about.shapes.values())
    one = elements * len(about.kinds) * about.dtype.itemsize
    several = config.checkpoint.every is not None or len(Course(config, about.history).parts) > 1
    needed = one * (2 if several else 1)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(401, f"cannot be read: {error.strerror}", "mend that", where=folder) from None
    if free < needed:
        what = (
            f"expected room for {needed / 1e9:.3g} GB of checkpoints ({one / 1e9:.3g} GB each), got {free / 1e9:.3g} GB"
        )
        raise UserError(403, what, "free space there, or give another run.dir", where=folder)


def _by_start(piece: list[int]) -> int:
    return piece[1]


def plain(config: Config) -> dict[str, Any]:
    """Return the config flat, in JSON's types."""
    return {key: in_json(value) for key, value in flatten(config).items()}
