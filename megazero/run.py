"""One training run from a checked config to its files: ranks, folder, trainer, weights, loss curve, last words."""

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import xxhash

from megazero import __version__
from megazero.build import bucket_of, check_world, grid_of
from megazero.build_run import Ready, build_trainer
from megazero.checkpoint.manifest import Manifest
from megazero.checkpointing import About, Site, changes, check_same, check_space
from megazero.config import Config
from megazero.config_file import dump, flatten
from megazero.errors import UserError
from megazero.expectation import Expectation
from megazero.ledger_file import write_ledger
from megazero.observe.console import clock_text
from megazero.observe.jsonl import read_rows
from megazero.observe.plot import draw_loss
from megazero.observe.sinks import warn
from megazero.out_of_memory import told
from megazero.parallel.agreement import agree
from megazero.parallel.board import BUILD, START, Board, Standing
from megazero.parallel.collectives import gather_bytes
from megazero.parallel.grid import Grid
from megazero.parallel.launch import Place, World, check_gpus, job_id, job_output, local_size, world_from_environment
from megazero.parallel.lobby import together
from megazero.parallel.outcome import outcome, say_why
from megazero.parallel.rendezvous import connect, disconnect
from megazero.parallel.signals import NOTED
from megazero.parallel.spawn import run_local
from megazero.pipelining import model_shape
from megazero.reading import open_regular
from megazero.resuming import Job, find_job, from_first, owed_row, resume, share
from megazero.run_folder import RunFolder
from megazero.run_lock import RunLock
from megazero.schedule_report import report, summary
from megazero.stopping import REQUEUE
from megazero.trainer import Trainer
from megazero.zero.resting import resting_table


def launch(config: Config, name: str, nproc: int | None, *, shares_gpus: bool = False) -> int:
    """Trains `config` on all ranks of a run, or on this one where torchrun or srun started it; the exit code.

    Args:
        name: of the config; the run's folder is `runs/<name>` unless run.dir says otherwise.
        nproc: local ranks to start; None for one per GPU, or on a CPU as many as the model is split over.
        shares_gpus: there may be more ranks than GPUs (see `World`).

    Raises:
        UserError: what is wrong before any rank has met another, or in a run of one process.
    """
    world = replace(world_from_environment(), shares_gpus=shares_gpus)
    if world.launcher and nproc is not None:
        raise UserError(100, f"--nproc {nproc} under {world.launcher}, which has started the ranks", "leave it out")
    check_gpus(world)
    split = config.parallel.tensor, config.parallel.pipeline
    size = world.size if world.launcher else local_size(nproc, *split, shares_gpus=shares_gpus)
    try:
        check_world(config, size)
    except UserError as error:
        if world.rank == 0:
            raise
        return error.exit_code  # rank 0 says it
    if size > 1 and not world.launcher:
        return run_local(
            size,
            lambda place: run_training(config, name, place),
            lambda *how: _after_failure(config, name, *how),
            notes_signals=True,
            shares_gpus=shares_gpus,
        )
    place = Place.of(world)
    place.signals.note()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTED)
    try:
        return run_training(config, name, place) if size == 1 else _one_of_many(config, name, place)
    finally:
        place.signals.restore()
        place.stacks.close()


def _one_of_many(config: Config, name: str, place: Place) -> int:
    """A rank that has no parent of ours."""
    code = outcome(lambda: run_training(config, name, place), place)
    if code:
        say_why(place)
    return code


def run_training(config: Config, name: str, place: Place) -> int:
    """One rank's part of a run, from meeting the others to the files; the exit code.

    Raises:
        UserError: whatever is wrong with the folder, the data, or the numbers.
        CollectiveError: another rank does not answer.
    """
    world = place.world
    wire = connect(
        place,
        timeout=timedelta(seconds=config.parallel.timeout),
        fingerprint=_fingerprint(config, world),
        bucket=bucket_of(config),
    )
    code = _train(config, name, place, grid_of(config, wire, world))
    disconnect()
    return code


def _train(config: Config, name: str, place: Place, grid: Grid) -> int:
    """Has the folder, and the lock on it, around everything that is done there."""
    folder, first = _folder(config, name), place.world.rank == 0
    lock = RunLock(folder.lock, job_id())
    with together(grid.world.wire.lobby, "run folder"):  # whose board does not tell yet who is missing
        dead = agree(
            grid.world, place.world.device, lambda: folder.create(lock, resume=_resumes(config)) if first else None
        )
    if dead:
        warn(f"{folder.path}: taken over from a job that has died ({dead})")
    try:
        return _train_in(config, name, place, grid, folder, lock)
    finally:
        if first:
            lock.release()


def _train_in(config: Config, name: str, place: Place, grid: Grid, folder: RunFolder, lock: RunLock) -> int:
    first, device, began = place.world.rank == 0, place.world.device, time.monotonic()
    place.seat.now(0, BUILD)
    with together(grid.world.wire.lobby, "logs"):
        log = agree(grid.world, device, lambda: _settle_in(folder, place))
    if place.world.shares_gpus:
        log.info(line := _sharing(place.world, grid))
        if first:
            _say(line)
    try:
        where = config.checkpoint.resume
        own = agree(grid.world, device, lambda: find_job(where, folder, lock.word) if first else None)
        job = share(own, grid.world, device)
        if job.stopped:
            if first:
                _say(f"nothing done: {folder.stop} is there; remove it to train")
            return 0
        agree(grid.world, device, lambda: folder.early_stops.refuse() if first else None)
        trainer, done = _trained(config, grid, device, Site(folder, lock, job, place.signals), name)
    except BaseException as error:
        log.error("%s: %s", type(error).__name__, error)
        if first:
            folder.release()
        raise
    trained = trainer.first < done
    # A job that was killed behind its last save has left some of this undone.
    lacking = from_first(first and not os.path.exists(folder.ledger), grid.world, device)
    if trained or lacking:
        write_ledger(folder, grid, device)
    stopped = trainer.reason if done < config.run.steps else None
    if stopped is not None and stopped.exit_code == REQUEUE and done == trainer.first:
        agree(grid.world, device, lambda: folder.early_stops.add(stopped.text) if first else None)
    if first:
        drawn = (trained or folder.picture_is_old()) and _draw(folder)
        if not trained and done >= config.run.steps:
            did = "finished what an earlier job left" if trainer.score or lacking or drawn else "nothing to do"
            _say(f"{did}: {folder.checkpoints} has step {done}, run.steps is {config.run.steps}")
        if stopped is None:
            _last_words(trainer, folder, time.monotonic() - began)
        else:
            kept = f"saved in {folder.checkpoints}; go on with checkpoint.resume=auto" if done else "nothing to save"
            kept += f" once {folder.stop} is gone" if not stopped.exit_code else ""
            _say(f"{stopped.text} after step {done} of {config.run.steps}, {kept}")
    return stopped.exit_code if stopped else 0


def _trained(config: Config, grid: Grid, device: torch.device, site: Site, name: str) -> tuple[Trainer, int]:
    """Builds the trainer, runs it to the end, and closes what it holds, whatever happens; and how many steps it did."""
    first, folder = grid.world.rank == 0, site.folder

    def built() -> Ready:
        with told(config, grid, device):
            return build_trainer(config, grid, device, site)

    trainer, about, holdings, ops = agree(grid.world, device, built)
    kernels = " and ".join(dict.fromkeys((ops.name, trainer.engine.ops.name)))  # the device's, and the update's
    names = gather_bytes(kernels.encode(), grid.world, "agree", device)
    agree(grid.world, device, lambda: _same_kernels(names))
    found = resume(
        site.job,
        holdings,
        lambda manifest, where: check_same(manifest, about, where),
        world=grid.world,
        device=device,
        warn=warn,
    )
    owed = from_first(
        agree(
            grid.world,
            device,
            lambda: _begin_files(config, site, about, found, trainer.validates) if first else None,
        ),
        grid.world,
        device,
    )
    if first:
        Expectation(config, grid, device, ops).write(folder.plan)
    parameters = model_shape(config).parameters()
    start = f"{name}: {parameters:,} parameters, {config.run.steps:,} steps of "
    start += f"{config.batch.global_ * config.model.seq_len:,} tokens on {_devices(grid, device)}, into {folder.path}"
    if found is not None:
        start += _going_on(found, config, site.job)
    logging.getLogger("megazero").info("%s (megazero %s, torch %s)", start, __version__, torch.__version__)
    if first:
        _say(start)
        _say(_resting(config, trainer))
        if config.parallel.pipeline > 1:
            _say(summary(report(config, grid.data.size)[0]))
    try:
        if found is not None:
            trainer.go_on(found, own=site.job.own, owed=owed)
        with told(config, grid, device):
            return trainer, trainer.run()
    finally:
        trainer.close()


def _begin_files(
    config: Config, site: Site, about: About, found: Manifest | None, validates: Callable[[int], bool]
) -> dict[str, Any] | None:
    """Remove what an earlier job has written beyond the step to go on from, and return the row that it owes."""
    check_space(config, about, site.folder.checkpoints)
    dump(config, site.folder.config)
    _keep_output(site.folder)
    due = found is not None and validates(found.step)
    return owed_row(site.folder.metrics, found, own=site.job.own, validates=due, warn=warn)


def _keep_output(folder: RunFolder) -> None:
    """Give a batch job's output a name in the run's folder; a disk that cannot costs a warning."""
    output = job_output()
    if output is not None and output.is_file():
        try:
            folder.keep_output(output, job_id())
        except OSError as error:
            warn(f"the job's output stays in {output} alone: {error.strerror}")


def _draw(folder: RunFolder) -> bool:
    """Draw the loss curve; False, and a warning, where that fails: the weights are safe."""
    try:
        draw_loss(read_rows(folder.metrics), folder.loss_plot)
    except (OSError, ValueError, MemoryError) as error:  # rows deleted, a full disk
        warn(f"no loss curve: {error or 'out of memory'}")
        return False
    return True


def _going_on(found: Manifest, config: Config, job: Job) -> str:
    said = changes(found, config)
    return f", going on from {job.store.path(found.step)}" + (f" with {said}" if said else "")


def _resumes(config: Config) -> bool:
    return config.checkpoint.resume != "none"


def _resting(config: Config, trainer: Trainer) -> str:
    units, spread = trainer.engine.units, trainer.engine.spread
    title = f"ZeRO stage {config.zero.stage} over {spread.data.size} data rank{'s' * (spread.data.size > 1)}, "
    return title + "resting on this rank between steps:\n" + resting_table(units, spread)


def _settle_in(folder: RunFolder, place: Place) -> logging.Logger:
    """This rank's log, and its seat where ranks without a common parent can read it, in the folder that rank 0 made."""
    try:
        if place.world.launcher in ("torchrun", "srun"):
            place.seat.move(Board.in_file(folder.board, place.world.size), place.world.rank)
        log = _log(folder, place.world.rank)
        place.stacks.into(folder.log(place.world.rank))
        return log
    except OSError as error:
        what = f"rank 0 made the folder, rank {place.world.rank} cannot write to it: {error.strerror}"
        raise UserError(
            401, what, "every host must see run.dir; give one on a shared disk", where=folder.path
        ) from None


def _after_failure(config: Config, name: str, standings: Sequence[Standing], line: str) -> None:
    """The log gets the line, and a run that failed before its first row does not keep the folder it had made."""
    if standings[0].phase == START:  # it had none
        return
    folder = _folder(config, name)
    with contextlib.suppress(OSError), folder.log(0).open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {line}\n")
    folder.release()


def _folder(config: Config, name: str) -> RunFolder:
    return RunFolder(config.run.dir or f"runs/{name}")


def _fingerprint(config: Config, world: World) -> str:
    """Of what must be the same on every rank."""
    digest = xxhash.xxh64_hexdigest(json.dumps(flatten(config), sort_keys=True, default=str).encode())
    shared = ", GPUs shared" if world.shares_gpus else ""
    return f"megazero {__version__}, torch {torch.__version__}, config {digest[:8]}{shared}"


def _sharing(world: World, grid: Grid) -> str:
    if grid.world.wire.bounce is None:
        return "--share-gpus changes nothing: " + ("one rank" if world.device.type == "cuda" else "there is no GPU")
    what = f"--share-gpus: {grid.world.size} ranks share their hosts' GPUs ({torch.cuda.device_count()} here)"
    return f"{what} and talk by gloo through pinned memory: for trying layouts out, every message waits for the host"


def _same_kernels(names: list[bytes]) -> None:
    if odd := [r for r, name in enumerate(names) if name != names[0]]:
        what = f"rank {odd[0]} has {names[odd[0]].decode()} kernels, rank 0 {names[0].decode()}: sums would differ"
        raise UserError(114, what, "give precision.kernels=reference, or the same compiler to all hosts")


def _devices(grid: Grid, device: torch.device) -> str:
    if grid.world.size == 1:
        return str(device)
    axes = ((a.name, a.size) for a in (grid.tensor, grid.pipeline, grid.data) if a.size > 1)
    return f"{grid.world.size} {device.type} ranks ({' x '.join(f'{name} {size}' for name, size in axes)})"


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        warn(f"a line of {self.baseFilename} is lost (disk full?)")


def _log(folder: RunFolder, rank: int) -> logging.Logger:
    log = logging.getLogger("megazero")
    log.setLevel(logging.INFO)
    for handler in list(log.handlers):  # of an earlier run in this process
        log.removeHandler(handler)
        handler.close()
    path = folder.log(rank)
    path.touch()
    with open_regular(path):  # a FIFO in its place would block for ever
        handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    return log


def _last_words(trainer: Trainer, folder: RunFolder, seconds: float) -> None:
    lines = [f"done in {clock_text(seconds)}"]
    if trainer.score is not None:
        lines.append(f"validation loss {trainer.score.loss:.4f} nats per token")
        if trainer.score.bits_per_byte is not None:
            lines[-1] += f", {trainer.score.bits_per_byte:.4f} bits per byte"
    lines.append(f"files in {folder.path}: metrics.jsonl, config.yaml, plan.json, ledger.json, checkpoints/, logs/")
    lines.append(f"loss curve {folder.loss_plot}")
    _say("\n".join(lines))


def _say(text: str) -> None:
    """Tells whoever watches; without a reader (`| head`) the run goes on, for its files are what counts."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)
