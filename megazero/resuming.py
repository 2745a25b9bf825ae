"""Where a run goes on from: found by rank 0, said to all, read and verified by all.

`checkpoint.resume` is `none`, `auto` (this run's own folder; a run that has saved nothing yet begins), or a path: of
another run, which goes on from its newest whole step, or of one step, which is that one or none.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.choose import load_newest
from megazero.checkpoint.manifest import FILE_NAME, Manifest, read_manifest, step_of
from megazero.checkpoint.save import Holding
from megazero.checkpoint.store import Store
from megazero.errors import UserError
from megazero.observe.jsonl import drop_rows_after
from megazero.parallel.agreement import agree
from megazero.parallel.collectives import gather_bytes
from megazero.parallel.grid import Axis
from megazero.reading import looked_up
from megazero.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """What all ranks of a job know alike of it.

    Attributes:
        word: of this job, from its lock.
        run: id of the run, the word of the job that began it.
        stopped: the kill switch is there.
        source: folder of the steps to go on from.
        steps: that are there, newest first; none: the run begins.
        own: they are this run's.
    """

    word: str
    run: str
    stopped: bool
    source: str
    steps: list[int]
    own: bool

    @property
    def store(self) -> Store:
        return Store(Path(self.source), self.word)


def find_job(resume: str, folder: RunFolder, word: str) -> Job:
    """What rank 0 finds, once the folder is its own.

    Raises:
        UserError: 402, there is nothing to go on from; 413, the folder has steps of another run than the one to go on
            from; 401, the disk does not answer.
    """
    try:
        return _find_job(resume, folder, word)
    except OSError as error:
        raise UserError(401, f"cannot be read: {error.strerror}", "mend that", where=error.filename) from None


def _find_job(resume: str, folder: RunFolder, word: str) -> Job:
    stopped = os.path.lexists(folder.stop)
    own = Store(folder.checkpoints, word)
    own.reap()
    if resume == "none":
        return Job(word, word, stopped, str(folder.checkpoints), [], True)
    path = Path(resume)
    if resume == "auto":
        store, steps = own, own.steps()
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
        store, steps, is_own = own, mine, True  # it has begun there, and goes on here
    run = next((id for step in steps if (id := _run_of(store.path(step)))), word) if is_own else word
    return Job(word, run, stopped, str(store.folder), steps, is_own)


def _run_of(folder: Path) -> str | None:
    with contextlib.suppress(UserError):
        return read_manifest(folder).run
    return None


def _asked_for(folder: Path) -> str | None:
    """The checkpoint.resume of the job that wrote a step."""
    with contextlib.suppress(UserError):
        return read_manifest(folder).config.get("checkpoint.resume")
    return None


def share(job: Job | None, world: Axis, device: torch.device) -> Job:
    """Return rank 0's job on all ranks."""
    return Job(**from_first(asdict(job) if job else None, world, device))


def from_first(value: Any, world: Axis, device: torch.device) -> Any:
    """Return rank 0's value, of JSON's types, on all ranks; what the others give is not used."""
    text = json.dumps(value).encode() if world.rank == 0 else b""
    return json.loads(gather_bytes(text, world, "agree", device)[0])


def owed_row(
    metrics: Path, found: Manifest | None, *, own: bool, validates: bool, warn: Callable[[str], object]
) -> dict[str, Any] | None:
    """Cut metrics.jsonl behind the step to go on from, and return that step's row where the file lacks it.

    A job that was killed between the commit of a step and its row has left the row in the step's manifest only; one
    that was stopped has had no time to validate the step.

    Args:
        found: of the step to go on from; None: the run begins.
        own: the step is this run's.
        validates: that step is to be validated.
        warn: told of rows that do not belong there.

    Raises:
        UserError: 406, metrics.jsonl is damaged; 401, it cannot be read or replaced.
    """
    step, progress = (found.step, found.progress) if found and own else (0, None)
    row = progress.row if progress else None
    try:
        last = drop_rows_after(metrics, step, warn)
        if row is None or last is None or last["step"] != step:
            return row
        if not validates or "valid_loss" in last:
            return None
        drop_rows_after(metrics, step - 1, warn)
        return row
    except ValueError as error:
        raise UserError(406, f"is damaged: {error}", "mend or remove the line, or the file", where=metrics) from None
    except OSError as error:
        what = f"cannot go on from step {step}: {error.strerror}"
        raise UserError(401, what, "mend or remove the file", where=metrics) from None


def resume(
    job: Job,
    holdings: Sequence[Holding],
    check: Callable[[Manifest, Path], None],
    *,
    world: Axis,
    device: torch.device,
    warn: Callable[[str], object],
) -> Manifest | None:
    """Loads the newest whole step into all ranks' tensors; None where there is none yet. Every rank calls it.

    Steps of this run that are damaged are put aside, so that it can reach them again.

    Raises:
        UserError: of `check`; 411, none is whole; 413, this run has newer steps than the one asked for.
    """
    if not job.steps:
        return None
    first, store, damaged = world.rank == 0, job.store, []

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
