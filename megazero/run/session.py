"""Run one training from a checked config to its files: ranks, folder, trainer, weights, loss curve, last lines."""

import json
import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import xxhash

from megazero.base.answers import say, warn
from megazero.base.doing import doing
from megazero.base.stop_signals import REQUEUE
from megazero.base.version import __version__
from megazero.builders.assemble import bucket_of, grid_of
from megazero.comm.home import Homes
from megazero.comm.status_board import BUILD
from megazero.config.flat import flatten, run_dir
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.launcher.environment import RankContext, job_id
from megazero.launcher.job_board import JobBoard
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.world import World
from megazero.observe.jsonl import read_rows
from megazero.observe.plot import draw_loss
from megazero.run.fitting import check_parts
from megazero.run.folder import RunFolder
from megazero.run.ledger_file import write_ledger
from megazero.run.lock import RunLock
from megazero.run.log import settle_in
from megazero.run.parts import Outcome, train_parts
from megazero.run.planned import Planner
from megazero.run.resume import find_start
from megazero.run.run import Evaluations, Run
from megazero.run.words import ending, sharing


def run_training(
    config: Config,
    name: str,
    place: RankContext,
    plan: Planner,
    homes: Homes,
    evaluations: Evaluations,
    allowed: Sequence[str] = (),
) -> int:
    """Run one rank of a run, from its connection to the others to the files; return the exit code.

    Args:
        config: with a micro-batch.
        name: the name of the config; the run's folder is `runs/<name>` unless run.dir says otherwise.
        plan: returns the plan of a part of the run.
        homes, evaluations: see `Run`.
        allowed: options and sections that may differ from the checkpoint that the run resumes from.

    Raises:
        UserError: a fault of the folder, the data, or the numbers.
        CollectiveError: another rank does not answer.
    """
    world = place.world
    with doing("meeting the other ranks"):
        comm = connect(
            place,
            timeout=timedelta(seconds=config.parallel.timeout),
            fingerprint=_fingerprint(config, world),
            start_timeout=timedelta(seconds=config.parallel.start_timeout),
            bucket=bucket_of(config),
        )
    folder = RunFolder(run_dir(config, name))
    lock = RunLock(folder.lock, job_id())
    grid = grid_of(config, comm, world)
    run = Run(config, grid, world.device, folder, lock, place.signals, plan, homes, evaluations, name, tuple(allowed))
    try:
        code = _train(run, place)
    finally:
        lock.release()
    disconnect()
    return code


def _train(run: Run, place: RankContext) -> int:
    """Create and lock the folder, open the logs, and train; return the exit code."""
    folder = run.folder
    resumes = run.config.checkpoint.resume != "none"

    def create() -> str | None:
        with place.signals.held():
            dead = folder.create(run.lock, resume=resumes) if run.is_first else None
            place.status_slot.now(0, BUILD)  # from here on the folder shows what happens to the run
            return dead

    dead = run.agree(create)
    if dead:
        warn(f"{folder.path}: taken over from a job that has died ({dead})")
    run.agree(lambda: settle_in(run, place.stacks))
    if isinstance(place.status_slot.board, JobBoard):
        place.status_slot.board.listen(place.stacks)
    return _train_in(run, place)


def _train_in(run: Run, place: RankContext) -> int:
    """Train in the folder of a run, which this job has locked; return the exit code."""
    began, folder, log = time.monotonic(), run.folder, logging.getLogger("megazero")
    if place.world.shares_gpus:
        log.info(line := sharing(place.world, run.grid))
        _say(run, line)
    try:
        if run.from_first(lambda: os.path.lexists(folder.stop)):
            _say(run, f"nothing done: {folder.stop} exists; remove it to train")
            return 0
        run.from_first(folder.early_stops.refuse)
        start = find_start(run)
        left, ranks = Course(run.config, start.history), run.grid["world"].size
        run.from_first(lambda: check_parts(left, ranks, done=start.at))
        ran = train_parts(run, start)
    except BaseException as error:
        log.error("%s: %s", type(error).__name__, error)
        raise
    # A job that was killed after its last save may have left some of this undone.
    if ran.first < ran.done or run.from_first(lambda: not folder.ledger.exists()):
        write_ledger(folder, run.grid, run.device)
    return _ended(run, ran, time.monotonic() - began)


def _ended(run: Run, ran: Outcome, seconds: float) -> int:
    """Draw the loss curve, and print how a job has ended; return the exit code."""
    folder, steps, trained = run.folder, run.config.run.steps, ran.first < ran.done
    stopped = ran.reason if ran.done < steps or ran.owes else None
    if stopped is not None and stopped.exit_code == REQUEUE and not trained:
        text = stopped.text
        run.from_first(lambda: folder.early_stops.add(text))
    if run.is_first and folder.picture_is_old() and (trained or stopped is None):
        _draw(folder)
    if stopped is None:
        nothing = f"nothing to do: {folder.checkpoints} has step {ran.done}, run.steps is {steps}"
        _say(run, ending(ran.scores, folder, seconds) if trained or ran.scores else nothing)
        return 0
    kept = f"saved in {folder.checkpoints}; go on with checkpoint.resume=auto" if ran.done else "nothing to save"
    kept += f" after you remove {folder.stop}" if not stopped.exit_code else ""
    _say(run, f"{stopped.text} after step {ran.done} of {steps}, {kept}")
    return stopped.exit_code


def _say(run: Run, text: str) -> None:
    if run.is_first:
        say(text)


def _draw(folder: RunFolder) -> None:
    """Draw the loss curve; only warn if that fails, because the weights are safe."""
    try:
        with doing("drawing the loss curve"):
            draw_loss(read_rows(folder.metrics), folder.loss_plot)
    except (OSError, ValueError, OverflowError, MemoryError) as error:  # rows deleted, a full disk
        warn(f"loss curve not drawn: {error or 'out of memory'}")


def _fingerprint(config: Config, world: World) -> str:
    """Return a text of what must be the same on every rank."""
    digest = xxhash.xxh64_hexdigest(json.dumps(flatten(config), sort_keys=True, default=str).encode())
    shared = ", GPUs shared" if world.shares_gpus else ""
    return f"megazero {__version__}, torch {torch.__version__}, config {digest[:8]}{shared}"
