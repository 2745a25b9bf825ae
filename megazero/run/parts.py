"""Train the parts of a run in order: build what a part needs, load its initial state, train to its end.

A part ends with a saved step. The next part resumes from that step in the same processes with its own options, as a
resumed run does, which has the same bits on every grid. So nothing has to be replaced in place, and a run that was
stopped in a part equals one that was not.
"""

import gc
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megazero.base.answers import say, warn
from megazero.base.doing import ACTIVITIES, doing
from megazero.base.errors import UserError
from megazero.base.heartbeat import HEART
from megazero.base.version import __version__
from megazero.builders.pipeline import check_world
from megazero.checkpoint.manifest import Manifest
from megazero.comm.status_board import TRAIN
from megazero.config.flat import dump
from megazero.config.stages import Course, Part
from megazero.launcher.environment import job_id, job_output
from megazero.run.build import Ready, build_trainer
from megazero.run.checkpointing import check_space
from megazero.run.disks import ranks_here
from megazero.run.history import changed_since
from megazero.run.loading import begin, check_kernels, check_same
from megazero.run.out_of_memory import explain_out_of_memory
from megazero.run.resume import Start, counted_from, load, owed_row
from megazero.run.run import Run
from megazero.run.words import beginning, doubts, next_part
from megazero.train.stopping import Reason

_BETWEEN = "build of a stage"  # the phase of ranks between two parts


class Outcome(NamedTuple):
    """The outcome of a job: which steps of a run it has done, and why it ends.

    Attributes:
        first, done: the steps done before the job, and after it.
        reason: why it ends before the last step; None: it does not, or everything is done.
        owes: whether an evaluation of the last step was broken off.
        scores: the results of the last evaluations.
    """

    first: int
    done: int
    reason: Reason | None
    owes: bool
    scores: Mapping[str, float]


def train_parts(run: Run, start: Start) -> Outcome:
    """Train the remaining parts of a run; return the outcome of the job."""
    ledger, began = run.grid.comm.ledger, time.monotonic()
    held, here = ledger.held(), ranks_here(run.config, run.grid, run.device)
    try:
        while isinstance(ended := _train_part(run, start, here, time.monotonic() - began), Start):
            start = ended
            if start.first is not None:
                # this phase counts as training: a signal is only noted, and the step is saved
                run.grid.comm.status_slot.now(start.at, _BETWEEN)
                ACTIVITIES.now("step", _BETWEEN, start.at + 1, run.config.run.steps)
            gc.collect()  # layers, units and their hooks form reference cycles
            ledger.let_go(held)
        return ended
    finally:
        run.signals.only_note(lambda _: None)  # the run ends anyway; a line on a signal would follow the run's last one
        HEART.say("")


def _train_part(run: Run, start: Start, here: int, spent: float) -> Start | Outcome:
    """Train one part of a run, and close everything that was built for it.

    Args:
        here: the number of ranks that share this host's memory.
        spent: the seconds that the job has trained before.

    Returns:
        the start of the next part, or the outcome of the job.
    """
    part, rank = _part_from(run, start), run.grid["pipeline"].rank

    def explained() -> AbstractContextManager[None]:
        return explain_out_of_memory(run.grid, lambda: run.plan(part.config, rank, True).savings())

    def built() -> Ready:
        with explained(), doing("building the model"):
            return build_trainer(run, start, part, here=here, spent=spent)

    ready = run.agree(built)
    try:
        found = _loaded(run, start, ready)
        if found is not None and start.load == "all" and found.progress is not None and found.step != start.at:
            # The newest step is damaged. The older one may be of another part, or from before a change of options.
            ready.trainer.engine.gather.finish()
            return replace(counted_from(run, start, found), steps=[found.step])
        row = _announce(run, start, part, ready, found) if start.first is None else None
        if start.first is not None:
            _announce_part(run, start, part, ready)
        if found is not None:
            begin(ready.trainer, found, start, row)
        run.signals.only_note(HEART.say)
        first = ready.trainer.first if start.first is None else start.first
        run.grid.comm.status_slot.now(0 if start.first is None else start.at, TRAIN)
        with explained():
            done = ready.trainer.run()
        trainer = ready.trainer
        if trainer.reason is not None or done >= run.config.run.steps:
            return Outcome(first, done, trainer.reason, trainer.owes, dict(trainer.scores))
        trainer.engine.gather.finish()  # the next part uses the same connections
        checkpoints, history = str(run.folder.checkpoints), ready.about.history
        return Start(start.word, start.run, checkpoints, [done], at=done, history=history, first=first)
    finally:
        ready.close()


def _part_from(run: Run, start: Start) -> Part:
    """Return the part to build: when a job begins, the part of the last step, which may owe its row and a validation.

    Later in a job, after a change of options, or if these ranks cannot train that part: the part of the next step.
    """
    course = Course(run.config, start.history)
    part, behind = course.trained(start.at), course.part(start.at)
    if start.first is not None or any(change["step"] == start.at for change in course.history):
        return behind
    try:
        check_world(part.config, run.grid["world"].size)
    except UserError:
        return behind
    return part


def _loaded(run: Run, start: Start, ready: Ready) -> Manifest | None:
    """Load the state with which a built part begins, on all ranks; return its manifest, or None without one."""
    kernels = dict.fromkeys((ready.ops.name, ready.trainer.engine.ops.name))  # the device's, and the update's
    names = run.gather(" and ".join(kernels))
    run.agree(lambda: check_kernels(names))
    about, course = ready.about, Course(run.config, ready.about.history)
    return load(run, start, ready.holdings, lambda found, where: check_same(found, about, course, where, start.load))


def _announce(run: Run, start: Start, part: Part, ready: Ready, found: Manifest | None) -> dict[str, Any] | None:
    """Write the config and the plan to the folder, if anything is trained, and print the run's first lines.

    Returns:
        the metrics row of the step that the run resumes from, if a killed job did not write it; else None.
    """
    folder, own_step = run.folder, found.step if found is not None and start.own else 0
    due = found is not None and ready.trainer.validates(found.step)
    trains = own_step < run.config.run.steps

    def begun() -> dict[str, Any] | None:
        if trains:
            check_space(run, ready.about)
        row = owed_row(folder.metrics, found, own=start.own, validates=due)
        if trains:
            dump(run.config, folder.config)
            ready.planned.write(folder.plan)
            if (output := job_output()) is not None:  # a batch job's output gets a link in the run's folder
                with suppress(OSError):
                    folder.log(0).with_name(f"slurm-{job_id()}.out").symlink_to(output.resolve())
        return row

    row = run.from_first(begun)
    first, *more = beginning(run, start, part, ready, found)
    log = logging.getLogger("megazero")
    log.info("%s (megazero %s, torch %s)", first, __version__, torch.__version__)
    if changed := changed_since(found, ready.about.history):
        log.info("changed: %s", changed)
    if run.is_first and (trains or row is not None):
        say("\n".join([first, *more]))
        for text in doubts(start, part, ready, found):
            warn(text)
    return row


def _announce_part(run: Run, start: Start, part: Part, ready: Ready) -> None:
    line = next_part(Course(run.config, start.history).trained(start.at), part, run.config.run.steps)
    logging.getLogger("megazero").info(line)
    if run.is_first:
        say(line)
        ready.planned.write(run.folder.plan)
