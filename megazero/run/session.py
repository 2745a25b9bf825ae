"""Run one training from a checked config to its files: ranks, folder, trainer, weights, loss curve, last lines."""

import contextlib
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import xxhash

from megazero.base.doing import doing
from megazero.base.errors import UserError, is_refusal
from megazero.base.heartbeat import HEART
from megazero.base.stop_signals import REQUEUE, stopped_by
from megazero.base.version import __version__
from megazero.build.assemble import bucket_of, grid_of
from megazero.comm.agreement import agree
from megazero.comm.grid import Grid
from megazero.comm.status_board import BUILD, START, STOPPED, RankStatus
from megazero.config.file import flatten, run_dir
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.launcher.environment import (
    RankContext,
    World,
    check_gpus,
    job_id,
    local_size,
    world_from_environment,
)
from megazero.launcher.exit_status import outcome, say_why
from megazero.launcher.job_board import JobBoard
from megazero.launcher.rendezvous import connect, disconnect, leave_at_once
from megazero.launcher.signals import StoppedEarly
from megazero.launcher.spawn import run_local
from megazero.observe.jsonl import read_rows
from megazero.observe.plot import draw_loss
from megazero.observe.sinks import warn
from megazero.run.checkpointing import RunContext
from megazero.run.early_look import check_parts
from megazero.run.folder import RunFolder, remove_empty
from megazero.run.history import accounted
from megazero.run.ledger_file import write_ledger
from megazero.run.lock import RunLock, remove_dead
from megazero.run.log import settle_in
from megazero.run.micro_batch import gpu, with_micro
from megazero.run.parts import train_parts
from megazero.run.resume import ResumePoint, find_job, from_first, newest_manifest, refuse_fewer, share
from megazero.run.words import ending, say, sharing


def launch(
    config: Config, name: str, nproc: int | None, *, shares_gpus: bool = False, allowed: Sequence[str] = ()
) -> int:
    """Train `config` on all ranks of a run, or on this one where torchrun or srun started it; return the exit code.

    Args:
        name: the config's; the run's folder is `runs/<name>` unless run.dir says otherwise.
        nproc: local ranks to start; None for one per GPU, or on a CPU as many as the model is split over.
        shares_gpus: there may be more ranks than GPUs (see `World`).
        allowed: options and sections that may be others than in the checkpoint that the run goes on from.

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
        done = None if _resumes(config) else 0
        check_parts(Course(with_micro(config, size)), size, f"--nproc {nproc}" if nproc else "", done=done)
    except UserError as error:
        if world.rank == 0:
            raise
        return error.exit_code  # rank 0 says it
    if size > 1 and not world.launcher:
        made = _folder(config, name).missing()
        return run_local(
            size,
            lambda place: run_training(config, name, place, allowed),
            lambda *how: _after_failure(_folder(config, name), made, *how),
            stopped=lambda number, statuses: _stopped_early(config, name, number, statuses[0].phase),
            shares_gpus=shares_gpus,
        )
    place = RankContext.of(world)
    place.signals.note()
    try:
        train = run_training if size == 1 else _one_of_many
        return train(config, name, place, allowed)
    except StoppedEarly as stop:
        if place.world.rank:  # rank 0 counts it and says so, for all
            return REQUEUE
        return _stopped_early(config, name, stop.number, place.status_slot.phase)
    finally:
        place.signals.restore()
        place.stacks.close()


def _one_of_many(config: Config, name: str, place: RankContext, allowed: Sequence[str]) -> int:
    """Run a rank that has no parent of ours. Raises StoppedEarly on rank 0, which counts that and says so for all."""
    code = outcome(lambda: run_training(config, name, place, allowed), place)
    place.signals.only_note(HEART.say)  # what the others say now is not to be lost
    if place.status_slot.state == STOPPED:
        if place.world.rank == 0 and place.signals.first is not None:
            raise StoppedEarly(place.signals.first)
    elif code:
        say_why(place)
        leave_at_once(code)
    return code


def run_training(config: Config, name: str, place: RankContext, allowed: Sequence[str] = ()) -> int:
    """Run one rank's part of a run, from meeting the others to the files; return the exit code.

    Raises:
        UserError: whatever is wrong with the folder, the data, or the numbers.
        CollectiveError: another rank does not answer.
    """
    world, device = place.world, place.world.device
    alone = device.type == "cuda" and not world.shares_gpus  # on a GPU whose memory is all this rank's
    memory = gpu(torch.cuda.get_device_properties(device).total_memory) if alone else None
    config = with_micro(config, world.size, memory)
    with doing("meeting the other ranks"):
        comm = connect(
            place,
            timeout=timedelta(seconds=config.parallel.timeout),
            fingerprint=_fingerprint(config, world),
            start_timeout=timedelta(seconds=config.parallel.start_timeout),
            bucket=bucket_of(config),
        )
    code = _train(config, name, place, grid_of(config, comm, world), allowed)
    disconnect()
    return code


def _train(config: Config, name: str, place: RankContext, grid: Grid, allowed: Sequence[str]) -> int:
    """Train with the folder and its lock held around all that is done there; a refused job leaves none behind."""
    folder, first = _folder(config, name), place.world.rank == 0
    lock, made = RunLock(folder.lock, job_id()), folder.missing() if first else []
    refused = False

    def create() -> str | None:
        with place.signals.held():
            dead = folder.create(lock, resume=_resumes(config)) if first else None
            place.status_slot.now(0, BUILD)  # from here on the folder tells of what happens to the run
            return dead

    try:
        with grid.comm.together("run folder"):  # whose board does not tell yet who is missing
            dead = agree(grid["world"], place.world.device, create)
        if dead:
            warn(f"{folder.path}: taken over from a job that has died ({dead})")
        return _train_in(config, name, place, grid, folder, lock, allowed)
    except UserError as error:
        refused = first and lock.held and is_refusal(error.code, place.status_slot.step)
        if refused:
            folder.empty(made)
        raise
    except StoppedEarly:
        if first and lock.held:
            folder.release()
        raise
    finally:
        if first:
            lock.release()
        if refused:
            remove_empty(made)


def _train_in(
    config: Config,
    name: str,
    place: RankContext,
    grid: Grid,
    folder: RunFolder,
    lock: RunLock,
    allowed: Sequence[str],
) -> int:
    first, device, began = place.world.rank == 0, place.world.device, time.monotonic()
    with grid.comm.together("logs"):
        log_file = agree(grid["world"], device, lambda: settle_in(folder, place))
    if isinstance(place.status_slot.board, JobBoard):
        place.status_slot.board.listen()
    log = logging.getLogger("megazero")
    if place.world.shares_gpus:
        log.info(line := sharing(place.world, grid))
        if first:
            say(line)
    try:
        where, load = config.checkpoint.resume, config.checkpoint.load

        def found() -> ResumePoint | None:
            job = find_job(where, load, folder, lock.word) if first else None
            return accounted(job, newest_manifest(job.store, job.steps), config, allowed) if job else None

        job = share(agree(grid["world"], device, found), grid["world"], device)
        if job.stopped:
            if first:
                folder.release()
                say(f"nothing done: {folder.stop} is there; remove it to train")
            return 0
        agree(grid["world"], device, lambda: folder.early_stops.refuse() if first else None)
        agree(grid["world"], device, lambda: refuse_fewer(job, config.run.steps) if first else None)
        left = Course(config, job.history)
        agree(grid["world"], device, lambda: check_parts(left, grid["world"].size, done=job.at or 0) if first else None)
        site = RunContext(folder, lock, job, place.signals)
        ran = train_parts(config, grid, place, site, name, log_file)
    except BaseException as error:
        log.error("%s: %s", type(error).__name__, error)
        if first:
            folder.release()
        raise
    if ran is None:
        log_file.forget()
        if first:
            say(f"nothing to do: {folder.checkpoints} has step {config.run.steps}, run.steps is {config.run.steps}")
        return 0
    done, trained = ran.done, ran.first < ran.done
    # A job that was killed behind its last save has left some of this undone.
    if trained or from_first(first and not folder.ledger.exists(), grid["world"], device):
        write_ledger(folder, grid, device)
    stopped = ran.reason if done < config.run.steps or ran.owes else None
    if stopped is not None and stopped.exit_code == REQUEUE and not trained:
        agree(grid["world"], device, lambda: folder.early_stops.add(stopped.text) if first else None)
    if first:
        if folder.picture_is_old() and (trained or stopped is None):
            _draw(folder)
        if not trained and done >= config.run.steps and stopped is None:
            say(f"finished what an earlier job left: {folder.checkpoints} has step {done}")
        if stopped is None:
            say(ending(ran.scores, folder, time.monotonic() - began))
        else:
            kept = f"saved in {folder.checkpoints}; go on with checkpoint.resume=auto" if done else "nothing to save"
            kept += f" once {folder.stop} is gone" if not stopped.exit_code else ""
            say(f"{stopped.text} after step {done} of {config.run.steps}, {kept}")
    return stopped.exit_code if stopped else 0


def _draw(folder: RunFolder) -> None:
    """Draw the loss curve; warn where that fails, because the weights are safe."""
    try:
        with doing("drawing the loss curve"):
            draw_loss(read_rows(folder.metrics), folder.loss_plot)
    except (OSError, ValueError, MemoryError) as error:  # rows deleted, a full disk
        warn(f"no loss curve: {error or 'out of memory'}")


def _resumes(config: Config) -> bool:
    return config.checkpoint.resume != "none"


def _stopped_early(config: Config, name: str, number: int, phase: str) -> int:
    """Count and report a run that a signal has ended before its first step, on all ranks; return the exit code.

    Args:
        phase: what rank 0 was doing; before it had the run's folder nothing is counted there.

    Raises:
        UserError: 422, that has happened too often in a row.
    """
    folder, text = _folder(config, name), stopped_by(number)
    if phase != START:
        remove_dead(folder.lock)
        if not folder.lock.exists():  # no other job has come in between
            folder.release()
        folder.early_stops.add(text)
    say(f"{text} before the first step, nothing to save")
    return REQUEUE


def _after_failure(folder: RunFolder, made: Sequence[Path], statuses: Sequence[RankStatus], line: str) -> None:
    """Write the line to the log; remove the folder of a run that was refused, if it had made it.

    Args:
        made: the folders that were not there before the ranks were.
    """
    if statuses[0].phase == START:  # it had none
        return
    refused = re.match(r"MZ-(\d{3}) ", line)
    if refused and is_refusal(int(refused[1]), max(status.step for status in statuses)):
        lock = RunLock(folder.lock)  # rank 0 may have been killed with it
        with contextlib.suppress(UserError, OSError):
            lock.take()
            folder.empty(made)
        lock.release()
        remove_empty(made)
    if folder.path.exists():
        with contextlib.suppress(OSError), folder.log(0).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {line}\n")
        folder.release()


def _folder(config: Config, name: str) -> RunFolder:
    return RunFolder(run_dir(config, name))


def _fingerprint(config: Config, world: World) -> str:
    """Return a text of what must be the same on every rank."""
    digest = xxhash.xxh64_hexdigest(json.dumps(flatten(config), sort_keys=True, default=str).encode())
    shared = ", GPUs shared" if world.shares_gpus else ""
    return f"megazero {__version__}, torch {torch.__version__}, config {digest[:8]}{shared}"
