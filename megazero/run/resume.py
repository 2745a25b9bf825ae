"""Find where a run goes on from: rank 0 finds it and tells all ranks, which read and verify it.

`checkpoint.resume` is `none`, `auto` (this run's own folder; a run that has saved nothing yet begins), or a path: of
another run, which goes on from its newest whole step, or of one step, which is that one or none. What is taken of it
is `run/loading.py`.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.checkpoint.choose import load_newest
from megazero.checkpoint.manifest import FILE_NAME, Manifest, read_manifest, step_of
from megazero.checkpoint.save import ShardState
from megazero.checkpoint.store import Store
from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Axis
from megazero.observe.jsonl import drop_rows_after
from megazero.observe.metrics import valid_losses
from megazero.run.folder import RunFolder


@dataclass(frozen=True)
class ResumePoint:
    """The point to resume from, known to all ranks of a job.

    Attributes:
        word: identifies this job, from its lock.
        run: id of the run, the word of the job that began it.
        stopped: the kill switch exists.
        source: folder of the steps to go on from.
        steps: the steps there, newest first; none: the run begins.
        own: they are this run's.
        load: what is taken of them (`checkpoint.load`); of steps that this run has trained itself, all.
        history: of changed options, with what `--allow-change` lets change now (`run/history.py`).
        allowed: what `--allow-change` names.
        at: the newest step that can be read, which that history ends with; None: there is none.
        data: the digest of its data, where other data are allowed; None: they are not.
    """

    word: str
    run: str
    stopped: bool
    source: str
    steps: list[int]
    own: bool
    load: str = "all"
    history: list[dict[str, Any]] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    at: int | None = None
    data: str | None = None

    @property
    def store(self) -> Store:
        return Store(Path(self.source), self.word)

    def next(self, checkpoints: str, step: int, history: list[dict[str, Any]]) -> "ResumePoint":
        """Return the point at which the next part of the same run begins: a step that was saved just now.

        Args:
            checkpoints: the run's own.
            history: of its changed options.
        """
        own = {"source": checkpoints, "steps": [step], "own": True, "load": "all"}
        return replace(self, **own, history=history, allowed=[], at=step, data=None)


def find_job(resume: str, load: str, folder: RunFolder, word: str) -> ResumePoint:
    """Return what rank 0 finds, once the folder is its own.

    Raises:
        UserError: 402, there is nothing to go on from; 413, the folder has steps of another run than the one to go on
            from, or steps that `load` would begin anew; 401, the disk does not answer.
    """
    try:
        return _find_job(resume, load, folder, word)
    except OSError as error:
        raise UserError(401, f"cannot be read: {error.strerror}", "mend that", where=error.filename) from None


def _find_job(resume: str, load: str, folder: RunFolder, word: str) -> ResumePoint:
    stopped = os.path.lexists(folder.stop)
    own = Store(folder.checkpoints, word)
    own.reap()
    if resume == "none":
        return ResumePoint(word, word, stopped, str(folder.checkpoints), [], True)
    path = Path(resume)
    if resume == "auto":
        store, steps = own, own.steps()
        if not steps and load != "all":
            what = f"nothing is saved here yet that checkpoint.load={load} could take"
            raise UserError(402, what, "give checkpoint.resume=PATH of a run, a step or an import", where=own.folder)
    elif (step := step_of(path)) is not None and (path / FILE_NAME).exists():
        store, steps = Store(path.parent), [step]
    else:
        store = Store(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        steps = store.steps()
        if not steps:
            what = f"no checkpoint to resume from{looked_up(path)}"
            raise UserError(402, what, "give a run's folder, or one of a step", where=path)
    is_own = store.folder.resolve() == folder.checkpoints.resolve()
    if not is_own and (mine := own.steps()):
        if not any(_asked_for(own.path(step)) == resume for step in mine):
            what = f"holds step {mine[0]} already, of a run that did not begin at {resume}"
            raise UserError(413, what, "give another run.dir", where=own.folder)
        store, steps, is_own, load = own, mine, True, "all"  # it has begun there, and goes on here
    elif is_own and steps and load != "all":
        load = _load_of_own(own, steps, resume, load)
    run = next((id for step in steps if (id := _run_of(store.path(step)))), word) if is_own else word
    return ResumePoint(word, run, stopped, str(store.folder), steps, is_own, load)


def _load_of_own(own: Store, steps: Sequence[int], resume: str, load: str) -> str:
    """Return what to take of this run's own steps: all, or what was asked for of an import that nobody has trained.

    Raises:
        UserError: 413, it would begin this run anew, over its own steps.
    """
    found = [manifest for step in steps if (manifest := manifest_of(own.path(step)))]
    if all(manifest.progress is None for manifest in found):
        return load
    began = [(manifest.config.get("checkpoint.resume"), manifest.config.get("checkpoint.load")) for manifest in found]
    if resume == "auto" or (resume, load) in began:
        return "all"
    what = f"holds step {steps[0]}, and checkpoint.load={load} begins a run anew"
    raise UserError(413, what, "give another run.dir, or checkpoint.load=all to go on", where=own.folder)


def manifest_of(folder: Path) -> Manifest | None:
    """Return a step's manifest; None: it is damaged."""
    with contextlib.suppress(UserError):
        return read_manifest(folder)
    return None


def _run_of(folder: Path) -> str | None:
    manifest = manifest_of(folder)
    return manifest.run if manifest else None


def _asked_for(folder: Path) -> str | None:
    """Return the checkpoint.resume of the job that wrote a step."""
    manifest = manifest_of(folder)
    return manifest.config.get("checkpoint.resume") if manifest else None


def refuse_fewer(job: ResumePoint, steps: int) -> None:
    """Refuse to train fewer steps than are done, a likely mistake, before anything of the run has changed.

    Raises:
        UserError: 120.
    """
    if job.load == "all" and job.steps and job.steps[0] > steps:
        what = f"step {job.steps[0]} is saved, run.steps is {steps}: fewer than are done"
        raise UserError(120, what, "raise run.steps; nothing was changed", where=job.source)


def newest_manifest(store: Store, steps: Sequence[int]) -> Manifest | None:
    """Return the manifest of the first of some steps, newest first, that can be read; None: there is none."""
    return next((manifest for step in steps if (manifest := manifest_of(store.path(step)))), None)


def share(job: ResumePoint | None, world: Axis, device: torch.device) -> ResumePoint:
    """Return rank 0's resume point on all ranks."""
    return ResumePoint(**from_first(asdict(job) if job else None, world, device))


def from_first(value: Any, world: Axis, device: torch.device) -> Any:
    """Return rank 0's value, of JSON's types, on all ranks; what the others give is not used."""
    text = json.dumps(value).encode() if world.rank == 0 else b""
    return json.loads(gather_bytes(text, world, "agree", device)[0])


@dataclass(frozen=True)
class Undone:
    """The work that a run has left to do.

    Attributes:
        trains: there are steps to train.
        row: the metrics row of the step to go on from, which a killed job did not write; None: it is there.
        ledger, picture: the file is missing; the loss curve is older than the rows.
    """

    trains: bool
    row: dict[str, Any] | None
    ledger: bool
    picture: bool

    @property
    def anything(self) -> bool:
        return self.trains or self.row is not None or self.ledger or self.picture


def owed_row(
    metrics: Path, found: Manifest | None, *, own: bool, validates: bool, warn: Callable[[str], object]
) -> dict[str, Any] | None:
    """Cut rows after the step to go on from out of metrics.jsonl, and return that step's row where the file lacks it.

    A job that was killed between the commit of a step and its row has left the row in the step's manifest only; one
    that was stopped has had no time to validate the step.

    Args:
        found: the manifest of the step to go on from; None: the run begins.
        own: the step is this run's.
        validates: that step is to be validated.
        warn: called about rows that do not belong there.

    Raises:
        UserError: 406, metrics.jsonl is damaged; 401, it cannot be read or replaced.
    """
    step, progress = (found.step, found.progress) if found and own else (0, None)
    row = progress.row if progress else None
    try:
        last = drop_rows_after(metrics, step, warn)
        if row is None or last is None or last["step"] != step:
            return row
        if not validates or valid_losses(last):
            return None
        drop_rows_after(metrics, step - 1, warn)
        return row
    except ValueError as error:
        raise UserError(406, f"is damaged: {error}", "mend or remove the line, or the file", where=metrics) from None
    except OSError as error:
        what = f"cannot go on from step {step}: {error.strerror}"
        raise UserError(401, what, "mend or remove the file", where=metrics) from None


def resume(
    job: ResumePoint,
    holdings: Sequence[ShardState],
    check: Callable[[Manifest, Path], None],
    *,
    world: Axis,
    device: torch.device,
    warn: Callable[[str], object],
) -> Manifest | None:
    """Load the newest whole step, or what is taken of it, into all ranks' tensors; return None where there is none yet.

    Every rank calls it.

    Steps of this run that are damaged are put aside, so that it can reach them again.

    Raises:
        UserError: of `check`; 411, none is whole; 413, this run has newer steps than the one asked for.
    """
    if not job.steps:
        return None
    first, store, damaged = world.rank == 0, job.store, []
    if job.load == "weights":
        holdings = [replace(holding, tensors={"weight": holding.tensors["weight"]}) for holding in holdings]

    def note(step: int, fault: str) -> None:
        damaged.append(step)
        if first:
            warn(fault if step == job.steps[-1] else f"{fault}; going on from an older step")

    manifest = load_newest(store, job.steps, holdings, check=check, world=world, device=device, damaged=note)
    agree(world, device, lambda: _clear_the_way(store, manifest.step, damaged) if first and job.own else None)
    return manifest


def _clear_the_way(store: Store, step: int, damaged: Sequence[int]) -> None:
    try:
        for found in damaged:
            store.put_aside(found)
        if newer := [found for found in store.steps() if found > step]:
            what = f"holds step {newer[0]}, which is newer than the step {step} to go on from"
            raise UserError(413, what, "give another run.dir, or move the newer steps away", where=store.folder)
    except OSError as error:
        raise UserError(401, f"cannot be written: {error.strerror}", "mend that", where=error.filename) from None
