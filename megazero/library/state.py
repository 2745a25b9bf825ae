"""Save and load what a sharded module holds: parameters, the optimizer's state, buffers.

The format is that of runs (docs/checkpoints.md): every rank writes its own part, blocks are hashed on their way, a step
exists once its folder has its name, and any number of ranks in any stage reads what any other wrote. Of a frozen
parameter and of a buffer the values alone are saved. Buffers are those of rank 0, as in torch's own wrappers.
"""

import math
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.base.version import __version__
from megazero.checkpoint.checkpoints import Checkpoints
from megazero.checkpoint.holdings import holding_to_load, holding_to_save
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import FORMAT, WEIGHT, File, Logical, Manifest, read_manifest
from megazero.checkpoint.pieces import Piece
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.save import Saver, ShardState, WrittenShard
from megazero.checkpoint.shard import BLOCK, NAMES
from megazero.checkpoint.store import Store
from megazero.comm.agreement import agree
from megazero.comm.grid import Grid
from megazero.library.following import following_of
from megazero.library.tables import RowShard
from megazero.zero.engine import Engine
from megazero.zero.unit import Unit

_UPDATES = "updates."  # in a manifest's config: of a parameter that was frozen in some


@dataclass(frozen=True)
class SavedStep:
    """The counts of a module's training that are saved beside its tensors."""

    steps: int
    skipped: int


class State:
    """The tensors of a sharded module, as checkpoints hold them.

    Args:
        units: all, frozen ones too.
        engine: over those that are trained.
        buffers: of the module, by name; saved by rank 0, loaded in place.
        tables: whose rows are split; each rank saves its own. What their optimizer keeps are tensors beside them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        engine: Engine,
        buffers: Mapping[str, Tensor],
        tables: Sequence[RowShard],
        grid: Grid,
        stage: int,
    ):
        self._rows = {name: (table, own) for table in tables for name, own in _tensors_of(table)}
        self._units, self._engine, self._buffers, self._grid, self._stage = units, engine, buffers, grid, stage
        self._world, self._device = grid["world"], units[0].device
        self._optimizer = following_of(engine)
        self._logical = {
            i.name: Logical(shape=list(i.shape), pieces=[], dtype=NAMES[unit.masters.dtype], trained=unit.trainable)
            for unit in units
            for i in unit.layout.intervals
        } | {
            name: Logical(shape=list(buffer.shape), pieces=[], dtype=NAMES[buffer.dtype], trained=False)
            for name, buffer in buffers.items()
        }
        for name, (table, own) in self._rows.items():
            shape = [table.whole, *own.shape[1:]]
            self._logical[name] = Logical(shape=shape, pieces=[], dtype=NAMES[own.dtype], trained=False)
        self._numel = {name: math.prod(logical.shape) for name, logical in self._logical.items()}

    def save(self, folder: Path, step: SavedStep) -> Path:
        """Write a step into a folder of steps; return the step's own folder. Every rank calls it.

        Raises:
            UserError: 403, it could not be written; 508, the step is there already; 302, a value is not finite.
        """
        first, store = self._world.rank == 0, Store(folder, "library")

        def prepare() -> None:
            if not first:
                return
            folder.mkdir(parents=True, exist_ok=True)
            store.reap()
            if store.path(step.steps).exists():
                raise UserError(508, f"step {step.steps} is there already", "give another folder", where=folder)

        agree(self._world, self._device, prepare)
        saver = Saver(
            store,
            [*self._held(saves=True), *(self._held_buffers() if first else [])],
            rank=self._world.rank,
            size=self._world.size,
            snapshot=False,
            conclude=(lambda *told: self._commit(store, *told)) if first else None,
            tidy=None,
        )
        checkpoints = Checkpoints(saver, self._world, self._device, every=None, background=False)
        try:
            checkpoints.save(step.steps, self._progress(step))
        finally:
            checkpoints.close()
        return store.path(step.steps)

    def verified(self, folder: Path, step: int | None) -> tuple[Path, Manifest]:
        """Return a step of a folder once all ranks have verified what they read of it. Every rank calls it.

        Args:
            step: None: the newest.

        Raises:
            UserError: 402, there is none; 410, it is damaged; 508, it is of another module, or another optimizer.
        """

        def read() -> tuple[Path, Manifest]:
            store = Store(folder)
            steps = store.steps()
            if not steps or (step is not None and step not in steps):
                raise UserError(402, f"no step{'' if step is None else f' {step}'} here", "was it saved?", where=folder)
            path = store.path(steps[0] if step is None else step)
            manifest = read_manifest(path)
            self._require_fitting(manifest, path)
            return path, manifest

        found = agree(self._world, self._device, read)
        self._read(*found, [*self._held(saves=False), *self._held_buffers()], fills=False)
        return found

    def load(self, path: Path, manifest: Manifest) -> SavedStep:
        """Fill all tensors from a step that has been verified; return its counts. Every rank calls it."""
        buffers = self._held_buffers()
        self._read(path, manifest, [*self._held(saves=False), *buffers], fills=True)
        for buffer, filled in zip(self._buffers.values(), buffers, strict=True):
            buffer.copy_(filled.tensors[WEIGHT].view(buffer.shape))
        progress = manifest.progress
        assert progress is not None, "a module's checkpoint has it"
        self._engine.restore(progress.updates, progress.loss_scale, progress.good_steps)
        counts = {k.removeprefix(_UPDATES): n for k, n in manifest.config.items() if k.startswith(_UPDATES)}
        self._optimizer.restore(progress.updates, counts)
        for unit in self._units:
            if not unit.trainable:
                self._engine.gather.publish(unit)
        self._engine.gather.unshard([unit for unit in self._units if unit.parameters.rest_whole])
        return SavedStep(manifest.step, progress.skipped)

    def _read(self, path: Path, manifest: Manifest, held: Sequence[ShardState], *, fills: bool) -> None:
        rank, size = self._world.rank, self._world.size
        agree(
            self._world,
            self._device,
            lambda: load_tensors(path, manifest, held, rank=rank, size=size, fills=fills),
        )

    def _held(self, *, saves: bool) -> list[ShardState]:
        hold = holding_to_save if saves else holding_to_load
        state = self._engine.optimizer.state
        held = [hold(unit, state[unit] if unit.trainable else {}, self._numel) for unit in self._units]
        for name, (table, own) in self._rows.items():
            start = table.first * own.shape[1:].numel()
            pieces = [Piece(name, start, start + own.numel(), 0)] if own.numel() else []
            held.append(ShardState(pieces, {WEIGHT: own.view(-1)}))
        return held

    def _held_buffers(self) -> list[ShardState]:
        flats = {name: buffer.detach().reshape(-1).clone() for name, buffer in self._buffers.items()}
        return [
            ShardState([Piece(name, 0, len(x), 0)] if len(x) else [], {WEIGHT: x}, any_value=True)
            for name, x in flats.items()
        ]

    def _progress(self, step: SavedStep) -> Progress:
        scale = self._engine.loss_scale
        return Progress(
            updates=step.steps - step.skipped,
            skipped=step.skipped,
            overflows=0,
            next_sample=step.steps,  # the samples are the caller's: a step counts as one
            loss_scale=float(scale.scale) if scale.dynamic else None,
            good_steps=int(scale.good),
        )

    def _commit(self, store: Store, step: int, progress: Progress, parts: Sequence[WrittenShard]) -> None:
        tensors = dict(self._logical)
        for name, logical in tensors.items():
            pieces = sorted(
                (piece for part in parts for piece in part.tensors.get(name, [])), key=lambda piece: piece[1]
            )
            tensors[name] = logical.model_copy(update={"pieces": pieces})
        sizes = {name: self._grid[name].size for name in ("tensor", "pipeline", "data")}
        counts = self._optimizer.counts(progress.updates)
        main = (self._engine.units or self._units)[0].masters.dtype
        manifest = Manifest(
            format=FORMAT,
            run=uuid.uuid4().hex,
            step=step,
            grid={**sizes, "stage": self._stage},
            dtype=NAMES[main],
            kinds=[WEIGHT, *self._engine.optimizer.STATE],
            tensors=tensors,
            block=BLOCK,
            files=[File(name=p.shard.name, size=p.shard.size, blocks=list(p.shard.blocks)) for p in parts],
            progress=progress,
            random={},
            identity={},
            config={"batch.global": 1, **{_UPDATES + name: n for name, n in counts.items()}},
            software={"megazero": __version__, "torch": torch.__version__, "python": platform.python_version()},
        )
        store.commit(step, manifest.to_bytes())

    def _require_fitting(self, manifest: Manifest, folder: Path) -> None:
        """Refuse a checkpoint of another module, or of another optimizer. Raises UserError 508."""
        names = sorted({*self._logical, *manifest.tensors})
        for name in names:
            own, saved = (_words(logicals.get(name), manifest.dtype) for logicals in (self._logical, manifest.tensors))
            if own != saved:
                what, do = f"{name}: expected {own}, got {saved}", "load it into the module that it was saved from"
                raise UserError(508, what, do, where=folder)
        kinds = [WEIGHT, *self._engine.optimizer.STATE]
        if manifest.kinds != kinds:
            what = f"expected the state {kinds} of this optimizer, got {manifest.kinds}"
            raise UserError(508, what, "load it with the optimizer that it was saved with", where=folder)


def _tensors_of(table: RowShard) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a table, with the names that they have in a checkpoint."""
    yield table.name, table.values
    yield from ((f"{table.name}/{kind}", own) for kind, own in table.state.items())


def _words(logical: Logical | None, dtype: str) -> str:
    if logical is None:
        return "nothing"
    frozen = "" if logical.trained else ", frozen or a buffer"
    return f"{logical.dtype or dtype} {logical.shape}{frozen}"
