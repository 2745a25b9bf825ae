"""Run one training from a checked config to its files: ranks, folder, trainer, weights, loss curve, last lines."""

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
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
from megazero.builders.assemble import bucket_of, grid_of
from megazero.comm.grid import Grid
from megazero.comm.status_board import BUILD, START, STOPPED, RankStatus
from megazero.config.file import flatten, run_dir
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.launcher.environment import (
    RankContext,
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
from megazero.launcher.world import World
from megazero.observe.jsonl import read_rows
from megazero.observe.plot import draw_loss
from megazero.observe.sinks import warn
from megazero.run.early_look import check_parts
from megazero.run.folder import RunFolder
from megazero.run.ledger_file import write_ledger
from megazero.run.lock import RunLock
from megazero.run.log import RunLog, settle_in
from megazero.run.micro_batch import gpu, with_micro
from megazero.run.parts import Outcome, train_parts
from megazero.run.resume import find_start
from megazero.run.run import Run
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
    folder = _folder(config, name)
    lock = RunLock(folder.lock, job_id())
    run = Run(config, grid, place.world.device, folder, lock, place.signals, name, tuple(allowed))
    made = folder.missing() if run.is_first else []

    def create() -> str | None:
        with place.signals.held():
            dead = folder.create(lock, resume=_resumes(config)) if run.is_first else None
            place.status_slot.now(0, BUILD)  # from here on the folder tells of what happens to the run
            return dead

    try:
        dead = run.agree(create)
        if dead:
            warn(f"{folder.path}: taken over from a job that has died ({dead})")
        log_file = run.agree(lambda: settle_in(run, place.stacks))
        if isinstance(place.status_slot.board, JobBoard):
            place.status_slot.board.listen()
        return _train_in(run, place, log_file)
    except UserError as error:
        if lock.held and is_refusal(error.code, place.status_slot.step):
            folder.remove(made)
        raise
    finally:
        lock.release()


def _train_in(run: Run, place: RankContext, log_file: RunLog) -> int:
    """Train in the folder of a run, which is this job's; return the exit code."""
    began, folder, log = time.monotonic(), run.folder, logging.getLogger("megazero")
    if place.world.shares_gpus:
        log.info(line := sharing(place.world, run.grid))
        _say(run, line)
    try:
        if run.from_first(lambda: os.path.lexists(folder.stop)):
            log_file.forget()
            _say(run, f"nothing done: {folder.stop} is there; remove it to train")
            return 0
        run.from_first(folder.early_stops.refuse)
        start = find_start(run)
        left, ranks = Course(run.config, start.history), run.grid["world"].size
        run.from_first(lambda: check_parts(left, ranks, done=start.at))
        ran = train_parts(run, start, log_file)
    except BaseException as error:
        log.error("%s: %s", type(error).__name__, error)
        raise
    if ran is None:
        log_file.forget()
        steps = run.config.run.steps
        _say(run, f"nothing to do: {folder.checkpoints} has step {steps}, run.steps is {steps}")
        return 0
    # A job that was killed behind its last save has left some of this undone.
    if ran.first < ran.done or run.from_first(lambda: not folder.ledger.exists()):
        write_ledger(folder, run.grid, run.device)
    return _ended(run, ran, time.monotonic() - began)


def _ended(run: Run, ran: Outcome, seconds: float) -> int:
    """Draw what was trained, and say how a job has ended; return the exit code."""
    folder, steps, trained = run.folder, run.config.run.steps, ran.first < ran.done
    stopped = ran.reason if ran.done < steps or ran.owes else None
    if stopped is not None and stopped.exit_code == REQUEUE and not trained:
        text = stopped.text
        run.from_first(lambda: folder.early_stops.add(text))
    if run.is_first and folder.picture_is_old() and (trained or stopped is None):
        _draw(folder)
    if stopped is None:
        if not trained:
            _say(run, f"finished what an earlier job left: {folder.checkpoints} has step {ran.done}")
        _say(run, ending(ran.scores, folder, seconds))
        return 0
    kept = f"saved in {folder.checkpoints}; go on with checkpoint.resume=auto" if ran.done else "nothing to save"
    kept += f" once {folder.stop} is gone" if not stopped.exit_code else ""
    _say(run, f"{stopped.text} after step {ran.done} of {steps}, {kept}")
    return stopped.exit_code


def _say(run: Run, text: str) -> None:
    if run.is_first:
        say(text)


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
        _locked(folder, lambda: None)  # rank 0 may have been killed with the lock
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
        _locked(folder, lambda: folder.remove(made))
    if folder.path.exists():
        with contextlib.suppress(OSError), folder.log(0).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {line}\n")


def _locked(folder: RunFolder, action: Callable[[], object]) -> None:
    """Do something with the lock of a folder, where no other job has it; remove the lock that a killed job left."""
    lock = RunLock(folder.lock)
    with contextlib.suppress(UserError, OSError):
        lock.take()
        action()
    lock.release()


def _folder(config: Config, name: str) -> RunFolder:
    return RunFolder(run_dir(config, name))


def _fingerprint(config: Config, world: World) -> str:
    """Return a text of what must be the same on every rank."""
    digest = xxhash.xxh64_hexdigest(json.dumps(flatten(config), sort_keys=True, default=str).encode())
    shared = ", GPUs shared" if world.shares_gpus else ""
    return f"megazero {__version__}, torch {torch.__version__}, config {digest[:8]}{shared}"
