"""Checkpoints of the tests' layouts: saved by all ranks of one grid, loaded by all of another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.choose import load_newest
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import Manifest, read_manifest
from megazero.checkpoint.pieces import Piece
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.save import ShardState
from megazero.checkpoint.shard import DTYPES
from megazero.checkpoint.store import Store
from megazero.comm.grid import Grid
from megazero.config.stages import Course
from megazero.data.sampler import index_of, sample_id
from megazero.evaluation.during import evaluations
from megazero.extensions.homes import HOMES
from megazero.launcher.signals import Signals
from megazero.launcher.world import World
from megazero.plan.job import Job
from megazero.run.checkpointing import about_run, checkpoints_of, holdings_of
from megazero.run.folder import RunFolder
from megazero.run.loading import check_same
from megazero.run.lock import RunLock
from megazero.run.resume import Start
from megazero.run.run import Run
from megazero.tools.training.plans import planner
from megazero.zero.placement import Precision
from tests.layouts import CPU, GLOBAL_BATCH, SHAPES, Rank, config_of


class Saving:
    """What one rank of a layout needs to save and to load."""

    def __init__(self, rank: Rank, folder: Path, precision: Precision, *, keep: int | None = None, background: bool):
        self.rank, self.grid = rank, rank.grid
        options = {"keep": keep, "async": background}
        config = config_of(rank.job, rank.shape, precision)
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_validate(options)})
        self.folder = RunFolder(folder)
        lock = RunLock(self.folder.lock)
        if self.grid["world"].rank == 0:
            self.folder.create(lock, resume=True)
        run = Run(config, self.grid, CPU, self.folder, lock, Signals(), planner(World(0, 1, 0)), HOMES, evaluations)
        start = Start("word", "run", str(self.folder.checkpoints))
        self.about = about_run(run, start, rank.built, "some data", None)
        self.lock, self.course = lock, Course(config)
        self.checkpoints = checkpoints_of(run, start, rank.built, self.about)

    def save(self, done: int) -> None:
        scale = self.rank.engine.loss_scale
        progress = Progress(
            updates=int(self.rank.engine.optimizer.pieces(self.rank.engine.units[0])[0].step),
            skipped=0,
            overflows=0,
            next_sample=done * GLOBAL_BATCH,
            loss_scale=float(scale.scale) if scale.dynamic else None,
            good_steps=int(scale.good),
        )
        self.checkpoints.save(done, progress)

    def close(self) -> None:
        self.checkpoints.finish()
        self.checkpoints.tidy()
        self.checkpoints.close()
        if self.grid["world"].rank == 0:
            self.lock.release()


def save_after(grid: Grid, layout: Job, flavour: str, precision: Precision, folder: Path, steps: int) -> float:
    """Trains some steps, saves, and trains one more: its loss."""
    rank = Rank(grid, layout, SHAPES[flavour], precision)
    saving = Saving(rank, folder, precision, background=False)
    for step in range(steps):
        rank.step(step)
    saving.save(steps)
    saving.close()
    return float(rank.step(steps).loss)


AHEAD = 4  # steps whose samples are compared: 64


@dataclass
class Loaded:
    """What a rank found: the manifest's digest, bytes read, the samples of the next steps, the next step's loss."""

    digest: str
    bytes_read: int
    samples: list[int]
    loss: float


def load_all(
    grid: Grid, layout: Job, flavour: str, precision: Precision, folders: dict[str, Path], again: Path
) -> dict[str, Loaded]:
    """Loads the newest step of each folder, saves it again, and trains one more step."""
    rank = Rank(grid, layout, SHAPES[flavour], precision)
    found = {}
    for name, folder in folders.items():
        saving = Saving(rank, again / name, precision, background=False)
        store = Store(RunFolder(folder).checkpoints)
        holdings = holdings_of(rank.built, saves=False)
        step = store.steps()[0]
        manifest = load_newest(
            store,
            [step],
            holdings,
            check=lambda manifest, where, saving=saving: check_same(manifest, saving.about, saving.course, where),
            world=rank.grid["world"],
            device=CPU,
            damaged=lambda step, fault: None,
        )
        progress = manifest.progress
        assert progress is not None
        rank.engine.restore(progress.updates, progress.loss_scale, progress.good_steps)
        saving.save(step)
        saving.close()
        read = load_tensors(store.path(step), manifest, holdings)
        ids = [
            sample_id(later, index_of(rank.data.rank, m, row, rank.data.size, layout.micro_batch), GLOBAL_BATCH)
            for later in range(step, step + AHEAD)
            for m in range(layout.micro_batches)
            for row in range(layout.micro_batch)
        ]
        found[name] = Loaded(manifest.digest, read, ids, float(rank.step(step).loss))
    return found


def logical_state(folder: Path) -> tuple[Manifest, dict[str, dict[str, Tensor]]]:
    """Of the newest step of a run every kind of every parameter, whole."""
    store = Store(RunFolder(folder).checkpoints)
    step = store.path(store.steps()[0])
    manifest = read_manifest(step)
    flat: dict[str, dict[str, Tensor]] = {
        name: {kind: torch.empty(logical.numel, dtype=DTYPES[manifest.dtype]) for kind in manifest.kinds}
        for name, logical in manifest.tensors.items()
    }
    holdings = [ShardState([Piece(name, 0, len(kinds["weight"]), 0)], kinds) for name, kinds in flat.items()]
    load_tensors(step, manifest, holdings)
    return manifest, flat


def options(layout: Job) -> dict[str, Any]:
    return {"tensor": layout.tensor, "pipeline": layout.pipeline, "shard": layout.neighbours}
