"""Find the start of a run: rank 0 finds it for all ranks, which read and verify it.

`checkpoint.resume` is `none`, `auto` (this run's own folder; a run that has saved nothing yet begins), or a path: of
another run, whose newest whole step is used, or of one step, which must be whole. `run/loading.py` says what is loaded
from the step.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.checkpoint.choose import load_newest
from megazero.checkpoint.manifest import FILE_NAME, Manifest, read_manifest, step_of
from megazero.checkpoint.save import ShardState
from megazero.checkpoint.store import Store
from megazero.observe.jsonl import drop_rows_after
from megazero.observe.metrics import results, valid_losses
from megazero.observe.sinks import warn
from megazero.run.history import accounted_for
from megazero.run.run import Run


@dataclass(frozen=True)
class Start:
    """The start of a run or of a part of it; equal on all ranks.

    Attributes:
        word: identifies this job, from its lock.
        run: the id of the run, which is the word of the job that began it.
        source: the folder of the steps to start from.
        steps: the steps there, newest first; none: the run begins.
        own: whether the steps are this run's.
        load: what is loaded from them (`checkpoint.load`); "all" for steps that this run has trained itself.
        at: the steps done before, according to the newest step that can be read.
        history: the changes of options, with those that `--allow-change` permits here (`run/history.py`).
        data: the digest of the data before this start, if other data are permitted; else None.
        first: the steps done before this job; None: the job has not begun to train.
    """

    word: str
    run: str
    source: str
    steps: list[int] = field(default_factory=list)
    own: bool = True
    load: str = "all"
    at: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    data: str | None = None
    first: int | None = None

    @property
    def store(self) -> Store:
        """Return the store of the steps."""
        return Store(Path(self.source), self.word)


def find_start(run: Run) -> Start:
    """Return the start that rank 0 finds, after it has locked the folder. Every rank calls it.

    Raises:
        UserError: 402, there is nothing to resume from; 413, the folder has steps of a run that did not begin at the
            path given, or steps that `load` would begin again; 120, run.steps is less than the steps done.
    """

    def found() -> dict[str, Any]:
        start = _found(run, run.config.checkpoint.resume, run.config.checkpoint.load)
        if start.load == "all" and start.steps and start.steps[0] > run.config.run.steps:
            what = f"step {start.steps[0]} is saved, but run.steps is {run.config.run.steps}"
            raise UserError(120, what, "raise run.steps; nothing was changed", where=start.source)
        return asdict(counted_from(run, start, next(manifests(start.store, start.steps), None)))

    return Start(**run.from_first(found))


def counted_from(run: Run, start: Start, manifest: Manifest | None) -> Start:
    """Return `start` with `at`, `history` and `data` as after a saved step; unchanged if not all of it is loaded.

    Args:
        manifest: the manifest of the step; None: there is no step.
    """
    if manifest is None or manifest.progress is None or start.load != "all":
        return start
    history, data = accounted_for(manifest, run.config, run.allowed)
    return replace(start, at=manifest.step, history=history, data=data)


def _found(run: Run, resume: str, load: str) -> Start:
    own, word = Store(run.folder.checkpoints, run.lock.word), run.lock.word
    own.reap()
    if resume == "none":
        return Start(word, word, str(own.folder))
    store, steps = _asked_for(Path(resume), own)
    if resume == "auto" and not steps and load != "all":
        what = f"no checkpoint is saved here yet for checkpoint.load={load}"
        raise UserError(402, what, "give checkpoint.resume=PATH of a run, a step or an import", where=own.folder)
    is_own = store.folder.resolve() == own.folder.resolve()
    if not is_own and (mine := own.steps()):
        if not any(manifest.config.get("checkpoint.resume") == resume for manifest in manifests(own, mine)):
            what = f"holds step {mine[0]} already, of a run that did not begin at {resume}"
            raise UserError(413, what, "give another run.dir", where=own.folder)
        store, steps, is_own, load = own, mine, True, "all"  # it began at that path, and resumes here
    elif is_own and steps and load != "all":
        load = _load_of_own(own, steps, resume, load)
    id_ = next((manifest.run for manifest in manifests(store, steps)), word) if is_own else word
    return Start(word, id_, str(store.folder), steps, is_own, load)


def _asked_for(path: Path, own: Store) -> tuple[Store, list[int]]:
    """Return the steps that `checkpoint.resume` names, newest first. Raises UserError 402: there are none."""
    if str(path) == "auto":
        return own, own.steps()
    if (step := step_of(path)) is not None and (path / FILE_NAME).exists():
        return Store(path.parent), [step]
    store = Store(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not (steps := store.steps()):
        what = f"no checkpoint to resume from{looked_up(path)}"
        raise UserError(402, what, "give the folder of a run or of a step", where=path)
    return store, steps


def _load_of_own(own: Store, steps: Sequence[int], resume: str, load: str) -> str:
    """Return what to load from this run's own steps: all, or `load` if they are an import that was not trained.

    Raises:
        UserError: 413, `load` would begin this run again, over its own steps.
    """
    found = list(manifests(own, steps))
    if all(manifest.progress is None for manifest in found):
        return load
    began = [(manifest.config.get("checkpoint.resume"), manifest.config.get("checkpoint.load")) for manifest in found]
    if resume == "auto" or (resume, load) in began:
        return "all"
    what = f"holds step {steps[0]}, but checkpoint.load={load} would begin the run again"
    raise UserError(413, what, "give another run.dir, or checkpoint.load=all to go on", where=own.folder)


def manifests(store: Store, steps: Sequence[int]) -> Iterator[Manifest]:
    """Yield the manifests of steps, without those that cannot be read."""
    for step in steps:
        with contextlib.suppress(UserError):
            yield read_manifest(store.path(step))


def owed_row(metrics: Path, found: Manifest | None, *, own: bool, validates: bool) -> dict[str, Any] | None:
    """Remove rows of later steps from metrics.jsonl; return the row of the resumed step if it must still be written.

    There are two such cases. A job was killed after it committed the step and before it wrote the row: then only the
    manifest has the row. Or a job was stopped before it evaluated the step: then the row in the file has no results, so
    it is removed and returned.

    Args:
        found: the manifest of the step to resume from; None: the run begins.
        own: whether the step is this run's; False: the run begins with the weights of another run.
        validates: whether an evaluation follows the step.

    Raises:
        UserError: 406, metrics.jsonl is damaged.
        OSError: it cannot be read or replaced.
    """
    step, progress = (found.step, found.progress) if found and own else (0, None)
    row = progress.row if progress else None
    try:
        last = drop_rows_after(metrics, step)
        if row is None or last is None or last["step"] != step:
            return row
        if not validates or valid_losses(last) or results(last):
            return None
        drop_rows_after(metrics, step - 1)
        return row
    except ValueError as error:
        do = "repair or remove the line, or the file"
        raise UserError(406, f"is damaged: {error}", do, where=metrics) from None


def load(
    run: Run, start: Start, holdings: Sequence[ShardState], check: Callable[[Manifest, Path], None]
) -> Manifest | None:
    """Load the newest whole step, or a part of it, into all ranks' tensors; return its manifest, or None without steps.

    Every rank calls it. Damaged steps of this run are put aside, so that the run can save them again.

    Args:
        check: refuses the manifest, in its folder, of a checkpoint that does not fit this run.

    Raises:
        UserError: from `check`; 411, no step is whole; 413, this run has newer steps than the one asked for.
    """
    if not start.steps:
        return None
    store, damaged = start.store, list[int]()
    if start.load == "weights":
        holdings = [replace(holding, tensors={"weight": holding.tensors["weight"]}) for holding in holdings]

    def note(step: int, fault: str) -> None:
        damaged.append(step)
        if run.is_first:
            warn(fault if step == start.steps[-1] else f"{fault}; going on from an older step")

    world = run.grid["world"]
    manifest = load_newest(store, start.steps, holdings, check=check, world=world, device=run.device, damaged=note)

    def clear_the_way() -> None:
        for found in damaged:
            store.put_aside(found)
        if newer := [found for found in store.steps() if found > manifest.step]:
            what = f"holds step {newer[0]}, which is newer than the step {manifest.step} to resume from"
            raise UserError(413, what, "give another run.dir, or move the newer steps away", where=store.folder)

    run.agree(lambda: clear_the_way() if run.is_first and start.own else None)
    return manifest
