"""Compare saves and loads with those of torch.distributed.checkpoint (DCP): time, and how long training stalls.

    python scripts/bench/checkpoint.py [--megabytes 100 500 2000] [--kinds save load stall behind] [--folder DIR]
                                       [--launches 3] [--pairs 21] [--json] [--save]

Two ranks of one thread each hold the state of a GPT (fp32 weights and both moments of AdamW, 12 bytes per parameter),
sharded over them as in ZeRO stage 1. The model is the *small* one, or with --megabytes a model with about that much
state: layers of the same width, but more or fewer of them. Both systems write the same bytes to the same disk and flush
them. *save* is the time from the call until the checkpoint exists. *load* fills all tensors from files that are in the
page cache (ours verifies every block, DCP nothing). *stall* is how long a background save stops training: in the call,
and (ours) before the next update, after one forward and backward pass that both systems do in the meantime. *behind* is
the stall plus these passes, because the save slows them down. The time that our save and load spend on hashes is a row
of its own.

`dcp-stager` is DCP with its asynchronous stager, which copies in its own thread into memory that it keeps; `dcp` has
the default stager. Ratios are relative to `dcp`: below 1.000 is faster. For states above a gigabyte two systems run at
a time, so that they fit into memory. Only files carry the bytes; our ranks agree through shared memory, DCP's through
sockets.
"""

import argparse
import itertools
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megazero.builders.assemble import Built, build, build_model
from megazero.checkpoint import shard
from megazero.checkpoint.choose import load_newest
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.store import Store
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Grid
from megazero.config.schema import Batch, Checkpoint, Config, Model, Zero, resolved
from megazero.evaluation.during import evaluations
from megazero.extensions.homes import HOMES
from megazero.kernels.select import choose
from megazero.launcher.signals import Signals
from megazero.launcher.world import World
from megazero.run.checkpointing import about_run, checkpoints_of, holdings_of
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from megazero.run.resume import Start
from megazero.run.run import Run
from megazero.tools.training.plans import planner
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.ours import CPU, SEQ_LEN, VOCAB, feeder, grid_of
from scripts.bench.processes import System

RANKS = 2
MODEL = Model(layers=8, hidden=512, heads=8, vocab=VOCAB, seq_len=SEQ_LEN, dropout=0.0)
BYTES = 12  # of state per parameter
KINDS = ("save", "load", "stall", "behind")
BATCH = 4
TOGETHER = 1e9  # bytes of state up to which all systems run at a time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", help="rough sizes of state (default: those of *small*)")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="what to measure (default: all)")
    parser.add_argument("--folder", help="folder to write to (default: the system's temporary folder)")
    add_options(parser)
    options = parser.parse_args()
    models = [MODEL] if options.megabytes is None else [model_of(megabytes) for megabytes in options.megabytes]
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
        groups = (groups_of(kind, model, folder, options.only) for model in models for kind in options.kinds)
        return run(itertools.chain.from_iterable(groups), options)


def model_of(megabytes: float) -> Model:
    """Return a model with about that much state; below 90 MB it is narrow, as a wide embedding alone has more."""
    hidden = 512 if megabytes >= 90 else 128
    ends, layer = (VOCAB + SEQ_LEN + 2) * hidden, 12 * hidden**2 + 13 * hidden
    layers = max(1, round((megabytes * 1e6 / BYTES - ends) / layer))
    return MODEL.model_copy(update={"layers": layers, "hidden": hidden})


def groups_of(kind: str, model: Model, folder: str, only: list[str]) -> Iterator[Group]:
    """Yield the groups of one kind: all systems together, or each alone with the reference if the state is large.

    Args:
        folder: each group writes to its own subfolder, which is removed before the next group.
    """
    size = BYTES * sum(parameter.numel() for parameter in build_model(_config(model)).parameters())
    background = kind in ("stall", "behind")
    who = ("dcp", "dcp-stager", "ours") if background else ("dcp", "ours", "hashing")
    systems = [
        System(f"{name}-{kind}", _build, (name, kind, model), ranks=RANKS, has_loss=False, times_itself=True)
        for name in who
    ]
    reference, *others = chosen(systems, only)
    parts = [others] if size <= TOGETHER else [[other] for other in others]
    for number, part in enumerate(parts, start=1):
        which = f" ({number} of {len(parts)})" * (len(parts) > 1)
        with tempfile.TemporaryDirectory(dir=folder) as where:
            group = [replace(one, arguments=(*one.arguments, where)) for one in (reference, *part)]
            yield Group(f"{kind} of {size / 1e6:.0f} MB{which}", group, again=False)


def meet_again(grid: Grid) -> None:
    """Wait until all ranks have called this."""
    gather_bytes(b"", grid["world"], "agree", CPU)


def _progress(step: int) -> Progress:
    return Progress(updates=step, skipped=0, overflows=0, next_sample=step * BATCH, loss_scale=None, good_steps=0)


def _config(model: Model) -> Config:
    batch = Batch.model_validate({"global": BATCH, "micro": 2})
    return resolved(Config(model=model, zero=Zero(stage=1), batch=batch))


def _build(who: str, kind: str, model: Model, folder: str, rank: int, size: int, store: str) -> Callable[[], float]:
    grid = grid_of(rank, size, store)
    config = _config(model)
    if who == "ours" and kind in ("stall", "behind"):
        config = config.model_copy(update={"checkpoint": Checkpoint.model_validate({"async": True})})
    built = build(config, grid, CPU, choose("auto", CPU, torch.float32))
    feed = feeder(config, grid)

    def passes() -> None:
        built.engine.begin_step()
        built.pipeline.train([feed(0)], lambda batch: batch)

    passes()
    built.engine.finish_step(1e-4)  # so that the moments are not zero
    where = Path(folder) / f"{who}-{kind}"
    if who.startswith("dcp"):
        return _dcp(kind, where, grid, built, passes, stager=who == "dcp-stager")
    act = _ours(kind, where, config, grid, built, passes)
    return _hashing(act) if who == "hashing" else act


def _hashing(act: Callable[[], float]) -> Callable[[], float]:
    """Return a call of `act` that returns only the seconds spent on hashes."""
    hash_of, seconds = shard.hash_of, [0.0]

    def timed(data: bytes | memoryview) -> str:
        began = time.perf_counter()
        found = hash_of(data)
        seconds[0] += time.perf_counter() - began
        return found

    def only_hashes() -> float:
        seconds[0] = 0.0
        act()
        return seconds[0]

    shard.hash_of = timed
    return only_hashes


def _ours(
    kind: str, where: Path, config: Config, grid: Grid, built: Built, passes: Callable[[], None]
) -> Callable[[], float]:
    folder = RunFolder(where)
    lock = RunLock(folder.lock)
    if grid["world"].rank == 0:
        folder.create(lock, resume=True)
    meet_again(grid)
    ours = Run(config, grid, CPU, folder, lock, Signals(), planner(World(0, 1, 0)), HOMES, evaluations)
    start = Start("bench", "bench", str(folder.checkpoints))
    about = about_run(ours, start, built, "none", None)
    checkpoints = checkpoints_of(ours, start, built, about)
    holdings, store = holdings_of(built, saves=False), Store(folder.checkpoints)
    steps = ((step, _progress(step)) for step in itertools.count(1))

    def clear() -> None:
        if grid["world"].rank == 0:
            for step in store.steps():
                shutil.rmtree(store.path(step))
        meet_again(grid)

    def save() -> float:
        clear()
        began = time.perf_counter()
        checkpoints.save(*next(steps))
        return time.perf_counter() - began

    def behind(passes_too: bool) -> float:
        clear()
        began = time.perf_counter()
        checkpoints.save(*next(steps))
        called = time.perf_counter()
        passes()
        passed = time.perf_counter()
        checkpoints.settle()
        settled = time.perf_counter()
        checkpoints.finish()
        return settled - began - (0.0 if passes_too else passed - called)

    def load() -> float:
        if not store.steps():
            save()
        meet_again(grid)
        began = time.perf_counter()
        load_newest(
            store,
            store.steps(),
            holdings,
            check=lambda manifest, where: None,
            world=grid["world"],
            device=CPU,
            damaged=lambda step, fault: print(fault, file=sys.stderr),
        )
        meet_again(grid)
        return time.perf_counter() - began

    return {"save": save, "load": load, "stall": partial(behind, False), "behind": partial(behind, True)}[kind]


def _dcp(
    kind: str, where: Path, grid: Grid, built: Built, passes: Callable[[], None], *, stager: bool
) -> Callable[[], float]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    mesh = init_device_mesh("cpu", (grid["world"].size,))
    state = {}
    for unit in built.engine.units:
        (run,) = built.engine.optimizer.runs(unit)
        for name, flat in {"weight": unit.masters, **run.state}.items():
            # DCP's staging for async_save copies whole storages, and fails on a tensor that is a part of one.
            own = flat.clone() if kind in ("stall", "behind") else flat
            state[f"{unit.layout.name}.{name}"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    steps = ((step, _progress(step)) for step in itertools.count(1))
    options = {"use_pinned_memory": False, "use_shared_memory": False, "use_non_blocking_copy": False}  # no GPU here
    staging = DefaultStager(StagingOptions(use_async_staging=True, **options)) if stager else None

    def clear() -> Path:
        if grid["world"].rank == 0:
            shutil.rmtree(where, ignore_errors=True)
        meet_again(grid)
        return where / str(next(steps))

    def save() -> float:
        path = clear()
        began = time.perf_counter()
        dcp_save(state, checkpoint_id=path)
        return time.perf_counter() - began

    def behind(passes_too: bool) -> float:
        path = clear()
        began = time.perf_counter()
        answer = dcp_async_save(state, checkpoint_id=path, async_stager=staging)
        called = time.perf_counter()
        passes()
        passed = time.perf_counter()
        if isinstance(answer, Future):
            answer.result()
        else:  # a thread does the staging, which must end before the update
            answer.staging_completion.result()
            called += time.perf_counter() - passed
            answer.upload_completion.result()
        meet_again(grid)
        return (passed if passes_too else called) - began

    def load() -> float:
        if not list(where.glob("*/.metadata")):
            save()
        meet_again(grid)
        (path,) = where.iterdir()
        began = time.perf_counter()
        dcp_load(state, checkpoint_id=path)
        meet_again(grid)
        return time.perf_counter() - began

    return {"save": save, "load": load, "stall": partial(behind, False), "behind": partial(behind, True)}[kind]


if __name__ == "__main__":
    sys.exit(main())
