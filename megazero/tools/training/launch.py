"""Start the ranks of a run: local ranks from this process, or this process as a rank of torchrun or srun."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megazero.base.answers import say
from megazero.base.errors import UserError
from megazero.base.heartbeat import HEART
from megazero.base.stop_signals import REQUEUE, stopped_by
from megazero.comm.status_board import START, STOPPED, RankStatus
from megazero.config.flat import run_dir
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.evaluation.during import evaluations
from megazero.extensions.homes import HOMES
from megazero.launcher.environment import RankContext, check_gpus, local_size, world_from_environment
from megazero.launcher.exit_status import outcome, say_why
from megazero.launcher.rendezvous import leave_at_once
from megazero.launcher.signals import StoppedEarly
from megazero.launcher.spawn import run_local
from megazero.plan.machines import Machine
from megazero.run.fitting import check_parts
from megazero.run.folder import RunFolder
from megazero.run.session import run_training
from megazero.tools.planning.micro_batch import gpu, sized
from megazero.tools.training.plans import planner


def launch(
    config: Config, name: str, nproc: int | None, *, shares_gpus: bool = False, allowed: Sequence[str] = ()
) -> int:
    """Train `config` on all ranks of a run, or on this one if torchrun or srun started it; return the exit code.

    Args:
        name: name of the config; the run's folder is `runs/<name>` unless run.dir gives another.
        nproc: local ranks to start; None for one per GPU, or on a CPU as many as the model is split over.
        shares_gpus: there may be more ranks than GPUs (see `World`).
        allowed: options and sections that may differ from the checkpoint that the run resumes from.

    Raises:
        UserError: a fault before ranks connect, or in a run of one process.
    """
    world = replace(world_from_environment(), shares_gpus=shares_gpus)
    if world.launcher and nproc is not None:
        raise UserError(100, f"--nproc {nproc} under {world.launcher}, which has started the ranks", "leave it out")
    check_gpus(world)
    split = config.parallel.tensor, config.parallel.pipeline
    size = world.size if world.launcher else local_size(nproc, *split, shares_gpus=shares_gpus)
    try:
        done = 0 if config.checkpoint.resume == "none" else None
        check_parts(Course(sized(config, size)), size, f"--nproc {nproc}" if nproc else "", done=done)
    except UserError as error:
        if world.rank == 0:
            raise
        return error.exit_code  # rank 0 reports it
    folder = RunFolder(run_dir(config, name))

    def train(place: RankContext) -> int:
        chosen = sized(config, size, _gpu_of(place))
        return run_training(chosen, name, place, planner(place.world), HOMES, evaluations, allowed)

    if size > 1 and not world.launcher:
        return run_local(
            size,
            train,
            lambda statuses, line: _log_failure(folder, statuses, line),
            stopped=lambda number, statuses: _stopped_early(folder, number, statuses[0].phase),
            shares_gpus=shares_gpus,
        )
    place = RankContext.of(world)
    place.signals.note()
    try:
        return train(place) if size == 1 else _one_of_many(train, place)
    except StoppedEarly as stop:
        if place.world.rank:  # rank 0 counts and reports it, for all ranks
            return REQUEUE
        return _stopped_early(folder, stop.number, place.status_slot.read().phase)
    finally:
        place.signals.restore()
        place.stacks.close()


def _gpu_of(place: RankContext) -> Machine | None:
    """Return a rank's GPU as a machine; None if the rank has no GPU, or shares it."""
    if place.world.device.type != "cuda" or place.world.shares_gpus:
        return None
    return gpu(torch.cuda.get_device_properties(place.world.device).total_memory)


def _one_of_many(train: Callable[[RankContext], int], place: RankContext) -> int:
    """Run a rank that a launcher started. Raises StoppedEarly on rank 0, which counts and reports it for all ranks."""
    code = outcome(lambda: train(place), place)
    place.signals.only_note(HEART.say)  # a signal must not cut off other ranks' reports
    if place.status_slot.read().state == STOPPED:
        if place.world.rank == 0 and place.signals.first is not None:
            raise StoppedEarly(place.signals.first)
    elif code:
        say_why(place)
        leave_at_once(code)
    return code


def _stopped_early(folder: RunFolder, number: int, phase: str) -> int:
    """Count and report a run that a signal has ended on all ranks before its first step; return the exit code.

    Args:
        phase: the phase of rank 0; before rank 0 had the run's folder, nothing is counted there.

    Raises:
        UserError: 422, this happened too often in a row.
    """
    text = stopped_by(number)
    if phase != START:
        folder.early_stops.add(text)
    say(f"{text} before the first step, nothing to save")
    return REQUEUE


def _log_failure(folder: RunFolder, statuses: Sequence[RankStatus], line: str) -> None:
    """Write the line of a failure to the log of rank 0, if rank 0 had the run's folder."""
    if statuses[0].phase != START and folder.path.exists():
        with contextlib.suppress(OSError), folder.log(0).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {line}\n")
