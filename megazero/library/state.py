"""Save and load what a sharded module holds: parameters, the optimizer's state, buffers.

The format is that of runs (docs/checkpoints.md): every rank writes its own part, blocks are hashed while they are
written, a step exists once its folder has its final name, and any number of ranks in any stage can read it. Only
the values of frozen parameters and buffers are saved. Buffers are those of rank 0, as in torch's own wrappers.
"""

import math
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import WEIGHT, Logical, Manifest, WrittenShard, read_manifest, with_pieces
from megazero.checkpoint.pieces import Piece, ShardState, holdings_of
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.retention import verify
from megazero.checkpoint.save import Checkpoints
from megazero.checkpoint.shard import NAMES
from megazero.checkpoint.store import Store
from megazero.comm.agreement import agree
from megazero.library.assembly import Assembly
from megazero.library.parts import saved_buffers
from megazero.plan.optimizers import AVERAGE

_UPDATES = "updates."  # key in a manifest's config: the count of a parameter that missed some


class State:
    """The tensors of a sharded module, as checkpoints hold them.

    Every rank saves its own part of units and tables, and their optimizer state; rank 0 saves the buffers.
    """

    def __init__(self, assembly: Assembly):
        self._assembly, self._world, self._device = assembly, assembly.memory.world, assembly.values.device
        self._units, self._buffers = assembly.values.units, saved_buffers(assembly.module)
        self._rows = {table.name: (table, table.values) for table in assembly.tables.shards}
        for table in assembly.tables.shards:
            self._rows |= {f"{table.name}/{kind}": (table, own) for kind, own in table.state.items()}
        self._kinds = [WEIGHT, *assembly.optimizer.kinds]
        self._logical = {name: _logical(buffer.shape, buffer.dtype) for name, buffer in self._buffers.items()}
        for name, (table, own) in self._rows.items():
            self._logical[name] = _logical((table.whole, *own.shape[1:]), own.dtype)
        for unit in self._units:
            for group, where in unit.layout.group_slices(slice(0, unit.numel)):
                kinds = [WEIGHT, *assembly.optimizer.states(group.optimizer)]
                own = kinds if unit.trainable and kinds != self._kinds else None
                for i in unit.layout.intervals:
                    if where.start <= i.start < where.stop:
                        self._logical[i.name] = _logical(i.shape, unit.masters.dtype, trained=unit.trainable, kinds=own)

    def save(self, folder: Path, steps: int, skipped: int) -> Path:
        """Write a step into a folder of steps; return the step's own folder. Every rank calls it.

        Args:
            steps, skipped: the steps done so far, and how many of them were skipped.

        Raises:
            UserError: 403, it could not be written; 508, the step is there already; 302, a value is not finite.
        """
        first, store = self._world.rank == 0, Store(folder, "library")

        def prepare() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            store.reap()
            if store.path(steps).exists():
                raise UserError(508, f"step {steps} exists already", "give another folder", where=folder)

        agree(self._world, self._device, prepare if first else lambda: None)
        checkpoints = Checkpoints(
            store,
            [*self._held(saves=True), *(self._held_buffers() if first else [])],
            self._world,
            self._device,
            every=None,
            background=False,
            conclude=(lambda *told: self._commit(store, *told)) if first else None,
            tidy=None,
        )
        try:
            checkpoints.save(steps, self._progress(steps, skipped))
        finally:
            checkpoints.close()
        return store.path(steps)

    def verified(self, folder: Path, step: int | None) -> tuple[Path, Manifest]:
        """Verify a step of a folder, each rank some of its files; return its path and manifest. Every rank calls it.

        Args:
            step: the step to verify; None: the newest.

        Raises:
            UserError: 402, there is none; 410, it is damaged; 508, it belongs to another module or optimizer.
        """

        def read() -> Path:
            store = Store(folder)
            steps = store.steps()
            if not steps or (step is not None and step not in steps):
                what = f"no step{'' if step is None else f' {step}'} here"
                raise UserError(402, what, "give a folder in which a step was saved, or another step", where=folder)
            path = store.path(steps[0] if step is None else step)
            self._require_fitting(read_manifest(path), path)
            return path

        path = agree(self._world, self._device, read)
        own = slice(self._world.rank, None, self._world.size)
        return path, agree(self._world, self._device, lambda: verify(path, files=own))

    def load(self, path: Path, manifest: Manifest) -> tuple[int, int]:
        """Fill all tensors from a step that has been verified. Every rank calls it.

        Returns: the steps done, and how many of them were skipped.
        """
        buffers, engine, optimizer = self._held_buffers(), self._assembly.engine, self._assembly.optimizer
        agree(self._world, self._device, lambda: load_tensors(path, manifest, [*self._held(saves=False), *buffers]))
        for buffer, filled in zip(self._buffers.values(), buffers, strict=True):
            buffer.copy_(filled.tensors[WEIGHT].view(buffer.shape))
        progress = manifest.progress
        assert progress is not None, "a module's checkpoint has it"
        engine.restore(progress.updates, progress.loss_scale, progress.good_steps)
        counts = {k.removeprefix(_UPDATES): n for k, n in manifest.config.items() if k.startswith(_UPDATES)}
        optimizer.restore(progress.updates, counts)
        for unit in self._units:
            if not unit.trainable:
                engine.gather.publish(unit)
        engine.gather.finish()
        return manifest.step, progress.skipped

    def _held(self, *, saves: bool) -> list[ShardState]:
        runs = self._assembly.optimizer.runs
        numel = {name: math.prod(logical.shape) for name, logical in self._logical.items()}
        held = [part for unit in self._units for part in holdings_of(unit, runs(unit), numel, saves=saves)]
        for name, (table, own) in self._rows.items():
            held.append(_held(name, own.view(-1), table.first * own.shape[1:].numel()))
        return held

    def _held_buffers(self) -> list[ShardState]:
        flats = {name: buffer.detach().reshape(-1).clone() for name, buffer in self._buffers.items()}
        return [_held(name, flat, any_value=True) for name, flat in flats.items()]

    def _progress(self, steps: int, skipped: int) -> Progress:
        scale = self._assembly.engine.loss_scale
        return Progress(
            updates=steps - skipped,
            skipped=skipped,
            overflows=0,
            next_sample=steps,  # the samples are the caller's: a step counts as one
            loss_scale=float(scale.scale) if scale.dynamic else None,
            good_steps=int(scale.good),
        )

    def _commit(self, store: Store, step: int, progress: Progress, written: Sequence[WrittenShard]) -> None:
        sizes = {name: self._assembly.grid[name].size for name in ("tensor", "pipeline", "data")}
        counts = self._assembly.optimizer.counts(progress.updates)
        moments = self._assembly.memory.moments
        main = (self._assembly.engine.units or self._units)[0].masters.dtype
        manifest = Manifest.new(
            run=uuid.uuid4().hex,
            step=step,
            grid={**sizes, "stage": self._assembly.stage},
            dtype=NAMES[main],
            kinds=self._kinds,
            dtypes={} if moments is None else {k: NAMES[moments] for k in self._kinds if k not in (WEIGHT, AVERAGE)},
            tensors=with_pieces(self._logical, written),
            files=[part.shard for part in written],
            progress=progress,
            config={"batch.global": 1, **{_UPDATES + name: n for name, n in counts.items()}},
        )
        store.commit(step, manifest.to_bytes())

    def _require_fitting(self, manifest: Manifest, folder: Path) -> None:
        """Refuse a checkpoint of another module, or of another optimizer. Raises UserError 508."""
        if manifest.kinds != self._kinds:
            what = f"expected the state {self._kinds} of this optimizer, got {manifest.kinds}"
            raise UserError(508, what, "load it with the optimizer that it was saved with", where=folder)
        for name in sorted({*self._logical, *manifest.tensors}):
            own, saved = (_words(logicals.get(name), manifest.dtype) for logicals in (self._logical, manifest.tensors))
            if own != saved:
                what, do = f"{name}: expected {own}, got {saved}", "load it into the module that it was saved from"
                raise UserError(508, what, do, where=folder)


def _held(name: str, flat: Tensor, first: int = 0, *, any_value: bool = False) -> ShardState:
    """Return `flat`, elements of tensor `name` from `first` on, for a checkpoint; any_value: allow NaN and infinity."""
    pieces = [Piece(name, first, first + len(flat), 0)] if len(flat) else []
    return ShardState(pieces, {WEIGHT: flat}, any_value=any_value)


def _logical(
    shape: Sequence[int], dtype: torch.dtype, *, trained: bool = False, kinds: list[str] | None = None
) -> Logical:
    return Logical(shape=list(shape), pieces=[], dtype=NAMES[dtype], trained=trained, kinds=kinds)


def _words(logical: Logical | None, dtype: str) -> str:
    if logical is None:
        return "nothing"
    frozen = "" if logical.trained else ", frozen or a buffer"
    kinds = "" if logical.kinds is None else f" with {', '.join(logical.kinds)}"
    return f"{logical.dtype or dtype} {logical.shape}{frozen}{kinds}"
