"""Train the parts of a run: build what a part needs, load what it begins with, train to its end; then the next one.

A part ends with a saved step, from which the next one goes on in the same processes with its own options: the way of a
run that goes on, which has the same bits on every grid. So nothing has to be exchanged in place, and a run that was
stopped in a part is the run that was not.
"""

import gc
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from megazero.base.doing import ACTIVITIES, doing
from megazero.base.errors import UserError
from megazero.base.heartbeat import HEART
from megazero.base.version import __version__
from megazero.build.pipeline import check_world
from megazero.checkpoint.manifest import Manifest
from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Grid
from megazero.comm.status_board import TRAIN
from megazero.config.file import dump
from megazero.config.schema import Config
from megazero.config.stages import Course, Part
from megazero.launcher.environment import RankContext, job_id, job_output
from megazero.observe.sinks import warn
from megazero.run.build import Ready, build_trainer
from megazero.run.checkpointing import RunContext, check_space
from megazero.run.disks import ranks_here
from megazero.run.folder import RunFolder
from megazero.run.history import accounted, changed_since
from megazero.run.loading import begin, check_kernels, check_same
from megazero.run.log import RunLog
from megazero.run.out_of_memory import explain_out_of_memory
from megazero.run.plan_check import Expectation
from megazero.run.resume import Undone, from_first, owed_row, resume
from megazero.run.words import beginning, doubts, next_part, say
from megazero.train.stopping import Reason
from megazero.train.validation import Score

_BETWEEN = "build of a stage"  # what ranks do between two parts


class Outcome(NamedTuple):
    """The outcome of a job: which steps of a run it has done, and why it ends.

    Attributes:
        first, done: steps done before it, and behind it.
        reason: why it ends before the last step; None: it does not, or everything is done.
        owes: a validation of the last step was broken off.
        scores: of the last validation, by the name of a set.
    """

    first: int
    done: int
    reason: Reason | None
    owes: bool
    scores: Mapping[str, Score]


@dataclass
class _Rank:
    """One rank of a job, and what it has built now.

    Attributes:
        here: ranks that share this host's memory.
        held: bytes by category before anything was built.
    """

    config: Config
    grid: Grid
    place: RankContext
    site: RunContext
    here: int
    held: Mapping[str, int]
    _ready: Ready | None = None

    @property
    def ready(self) -> Ready:
        assert self._ready is not None, "a part is built"
        return self._ready

    @property
    def device(self) -> torch.device:
        return self.place.world.device

    def build(self, part: Part, spent: float = 0.0) -> Ready:
        """Build what a part needs, on all ranks or on none.

        Args:
            spent: seconds that the job has trained before.
        """
        grid, device = self.grid, self.device

        def built() -> Ready:
            with explain_out_of_memory(part.config, grid, device), doing("building the model"):
                return build_trainer(self.config, grid, device, self.site, self.here, part=part, spent=spent)

        self._ready = agree(grid["world"], device, built)
        return self._ready

    def drop(self) -> None:
        """Close what was built, and give its memory back; the caller has no reference to it left."""
        self.close()
        gc.collect()  # layers, units and their hooks know each other
        self.grid.comm.ledger.let_go(self.held)

    def close(self) -> None:
        """End the background work of what was built."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            ready.close()


def train_parts(
    config: Config, grid: Grid, place: RankContext, site: RunContext, name: str, log_file: RunLog
) -> Outcome | None:
    """Train what is left of a run, and close what that holds, whatever happens.

    Returns:
        what was done; None where there was nothing to do: the folder is as it was.
    """
    rank = _Rank(config, grid, place, site, ranks_here(config, grid, place.world.device), grid.comm.ledger.held())
    began = time.monotonic()
    try:
        part, found = _first_part(rank)
        ready = rank.ready
        undone = _begin_files(rank, part, found)
        if not undone.anything:
            return None
        log_file.begin()
        _announce(part.config, grid, rank.site, ready, name, found)
        if found is not None:
            begin(ready.trainer, found, rank.site.job, undone.row)
        site.signals.only_note(HEART.say)
        first = ready.trainer.first
        del ready  # what was built is to be freed before more is
        return _train_on(rank, part, first, began)
    finally:
        site.signals.only_note(lambda _: None)  # the run ends anyway; a line of it would come behind the last one
        HEART.say("")
        rank.close()


def _first_part(rank: _Rank) -> tuple[Part, Manifest | None]:
    """Build the part of the step to go on from, and load that.

    The newest step may be damaged, and an older one be of another part, or of the time before some options changed.
    """
    at = 0 if rank.site.job.load != "all" else rank.site.job.at or 0
    while True:
        part = _part_behind(Course(rank.config, rank.site.job.history), at, rank.grid["world"].size)
        rank.build(part)
        found = _loaded(rank)
        if found is None or rank.site.job.load != "all" or found.progress is None or found.step == at:
            return part, found
        rank.drop()
        job = accounted(rank.site.job, found, rank.config, rank.site.job.allowed)
        at, rank.site = found.step, replace(rank.site, job=replace(job, steps=[found.step]))


def _part_behind(course: Course, step: int, ranks: int) -> Part:
    """Return the part to build when a step is done: that of the step, which may owe its row and a validation.

    Where options have changed behind it, or these ranks cannot train it any more, the part of the next step.
    """
    part = course.trained(step)
    if any(change["step"] == step for change in course.history):
        return course.part(step)
    try:
        check_world(part.config, ranks)
    except UserError:
        return course.part(step)
    return part


def _train_on(rank: _Rank, part: Part, first: int, began: float) -> Outcome:
    """Train to the end of a part, and then the parts behind it, until the run is done or told to end.

    Args:
        part: what is built.
        first: steps done before the job.
        began: by the clock, when the job began to build.
    """
    config, grid, place, done = rank.config, rank.grid, rank.place, 0
    while True:
        ready = rank.ready
        place.status_slot.now(done, TRAIN)
        with explain_out_of_memory(part.config, grid, rank.device):
            done = ready.trainer.run()
        trainer, course, before = ready.trainer, ready.data.course, part
        if trainer.reason is not None or done >= config.run.steps:
            return Outcome(first, done, trainer.reason, trainer.owes, dict(trainer.scores))
        job = rank.site.job.next(str(rank.site.folder.checkpoints), done, ready.about.history)
        part, rank.site = course.part(done), replace(rank.site, job=job)
        del ready, trainer
        place.status_slot.now(done, _BETWEEN)  # not before the first step: a signal is noted, and the step is saved
        ACTIVITIES.now("step", _BETWEEN, done + 1, config.run.steps)
        rank.drop()
        ready = rank.build(part, time.monotonic() - began)
        found = _loaded(rank)
        assert found is not None, "there is a step"
        begin(ready.trainer, found, job, None)
        _announce_part(rank, before, part, ready)
        del ready


def _loaded(rank: _Rank) -> Manifest | None:
    """Load what the part that is built begins with on all ranks; None: it begins with nothing."""
    grid, device, job, ready = rank.grid, rank.device, rank.site.job, rank.ready
    about, ops = ready.about, ready.ops
    kernels = " and ".join(dict.fromkeys((ops.name, ready.trainer.engine.ops.name)))  # the device's, and the update's
    names = gather_bytes(kernels.encode(), grid["world"], "agree", device)
    agree(grid["world"], device, lambda: check_kernels(names))
    return resume(
        job,
        ready.holdings,
        lambda manifest, where: check_same(manifest, about, where, job.load),
        world=grid["world"],
        device=device,
        warn=warn,
    )


def _begin_files(rank: _Rank, part: Part, found: Manifest | None) -> Undone:
    """Find what is left to do; where that is training, write to the folder what is trained now."""
    config, grid, device, site, ready = rank.config, rank.grid, rank.device, rank.site, rank.ready
    first, folder, trainer = grid["world"].rank == 0, site.folder, ready.trainer
    trains = not (site.job.own and found is not None and found.step >= config.run.steps)
    due = found is not None and trainer.validates(found.step)

    def begun() -> dict[str, Any]:
        if trains:
            check_space(config, ready.about, folder.checkpoints)
        row = owed_row(folder.metrics, found, own=site.job.own, validates=due, warn=warn)
        if trains:
            dump(config, folder.config)
            _keep_output(folder)
            Expectation(part.config, grid, device, ready.ops).write(folder.plan)
        return asdict(Undone(trains, row, not folder.ledger.exists(), folder.picture_is_old()))

    return Undone(**from_first(agree(grid["world"], device, lambda: begun() if first else None), grid["world"], device))


def _announce(config: Config, grid: Grid, site: RunContext, ready: Ready, name: str, found: Manifest | None) -> None:
    start, *more = beginning(config, grid, site, ready, name, found)
    log = logging.getLogger("megazero")
    log.info("%s (megazero %s, torch %s)", start, __version__, torch.__version__)
    if changed := changed_since(found, ready.about.history):
        log.info("changed: %s", changed)
    if grid["world"].rank == 0:
        say("\n".join([start, *more]))
        for text in doubts(config, site, ready, found):
            warn(text)


def _announce_part(rank: _Rank, before: Part, part: Part, ready: Ready) -> None:
    line = next_part(before, part, rank.config.run.steps)
    logging.getLogger("megazero").info(line)
    if rank.grid["world"].rank == 0:
        say(line)
        Expectation(part.config, rank.grid, rank.device, ready.ops).write(rank.site.folder.plan)


def _keep_output(folder: RunFolder) -> None:
    """Give a batch job's output a name in the run's folder; warn where the disk cannot."""
    output = job_output()
    if output is not None:
        try:
            if output.is_file():
                folder.keep_output(output, job_id())
        except OSError as error:
            warn(f"the job's output stays in {output} alone: {error.strerror}")
