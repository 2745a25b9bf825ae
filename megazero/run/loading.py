"""Begin a run with all or a part of a checkpoint, as `checkpoint.load` says, and check that the two match.

    load        loaded from the checkpoint                         begins again
    all         everything: the run resumes                        nothing
    optimizer   weights, both moments, and the number of updates   step, learning rate, data, loss scale
                that the moments have seen
    weights     weights                                            as with optimizer, and the moments with their count

With `weights`, `model.vocab` may be larger: rows that the checkpoint lacks keep the values that they have in a new run
with this seed. With `optimizer` it may not: one count of updates corrects all moments, and new rows have seen none.

`checkpoint.load` applies only to a start from another run. From steps in its own folder a run resumes with everything,
so that a command with `checkpoint.load` can be repeated. An import has only weights, whatever the option says.

Adam corrects its moments for their start at zero, by 1 / (1 - beta^n), where n is the updates they have seen. Moments
that are carried over keep their n (`Progress.carried`): with a count from 1 they would at first be multiplied
by 1 / (1 - beta). The learning rate counts the new run's updates.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megazero.base.errors import UserError
from megazero.checkpoint.manifest import Manifest
from megazero.config.changes import FREE, row_of
from megazero.config.stages import Course
from megazero.plan.optimizers import AVERAGE
from megazero.run.history import changed_since, differences, held_out, saved_options
from megazero.run.resume import Start
from megazero.train.trainer import Trainer

# Options that may differ and then change what is computed: printed when a run resumes.
_SAID = ("run.steps", "run.*spike*", "optimizer.*", "schedule.*", "zero.*_dtype", "zero.quantize.*")
_SAID += ("zero.offload.delayed", "precision.kernels", "precision.masters")


def taken(manifest: Manifest, load: str) -> str:
    """Return what is loaded from a checkpoint: `load`, but only weights from an import, which has no run."""
    return "weights" if manifest.progress is None else load


def check_same(found: Manifest, ours: Manifest, course: Course, where: Path, load: str = "all") -> None:
    """Refuse a checkpoint of another model, and, if `load` needs them, of other data or another optimizer.

    Args:
        ours: the content that all manifests of this run share (`about_run`).
        course: the course of this run.

    Raises:
        UserError: 412, they differ (the checkpoint's values come first), moments are needed but missing, or the samples
            consumed are not those of `course`.
    """
    if found.progress is None and load == "optimizer":
        raise UserError(412, "holds only weights, no moments", "give checkpoint.load=weights", where=where)
    load = taken(found, load)
    for name in (name for name in ours.tensors if name in found.tensors and load != "weights"):
        kinds, own = ([kind for kind in one.kinds_of(name) if kind != AVERAGE] for one in (found, ours))
        if kinds != own:
            what = f"{name}: expected {own}, as its optimizer keeps, got {kinds}"
            raise UserError(412, what, "give checkpoint.load=weights", where=where)
    other = _others(found, ours, load)
    grows = new_rows(found, ours) > 0
    if grown := grows and load == "weights":
        del other["model.vocab"]
    what, do = "does not fit this model", "load it with the model it was made with"
    if load == "all":
        what, do = "does not fit this run", f"resume with the config it was made with{_permission(other, ours.config)}"
    if not other and (name := found.other_shape(_with_rows_of(found, ours) if grown else ours.shapes)):
        other = {name: (found.shapes.get(name), ours.shapes.get(name))}
    pair = found.dtype, ours.dtype
    # Masters of fp32 may begin, or end, in a run in bf16; to widen weights for another run rounds nothing.
    widened = {*pair} == {"F32", "BF16"} or (load != "all" and pair == ("F32", "F64"))
    if not other and found.dtype != ours.dtype and not widened:
        other = {"dtype": (found.dtype, ours.dtype)}
    if other:
        do += ", or begin a run with checkpoint.load=weights, where the vocabulary may grow" if grows != grown else ""
        raise UserError(412, f"{what} (saved -> this): {_some(other)}", do, where=where)
    consumed = course.samples(found.step)
    if load == "all" and found.progress is not None and found.progress.next_sample != consumed:
        what = f"has consumed {found.progress.next_sample:,} samples, but these options give {consumed:,}"
        raise UserError(412, what, "resume with the config it was made with", where=where)


def _others(found: Manifest, ours: Manifest, load: str) -> dict[str, tuple[Any, Any]]:
    """Return the places that differ from a checkpoint and must not: (the checkpoint's value, this run's)."""
    changed = {change["key"] for change in changed_since(found, ours.history)}
    options = differences(saved_options(found), ours.config)
    options = {place: pair for place, pair in options.items() if _option_of(place) not in changed}
    other = {place: pair for place, pair in options.items() if _must_stay(place, load, ours.config)}
    if load == "all":
        identity = differences(found.identity, ours.identity)
        other |= {key: pair for key, pair in identity.items() if key not in changed}
        if "data" in other and (mix := {place: pair for place, pair in options.items() if _mixes(place, pair)}):
            del other["data"]
            other |= mix
    return other


def _must_stay(place: str, load: str, config: Mapping[str, Any]) -> bool:
    """Return whether an option must be as in the checkpoint; the data's digest checks options of the data."""
    if load != "all":  # moments are running means with these betas
        betas = load == "optimizer" and place in ("optimizer.betas", "optimizer.muon.momentum")
        return betas or (place.startswith("model.") and place not in _free(config))
    if "data.sources" in place or place in ("data.train", "data.valid", "data.tokenizer"):
        return False
    key = place.partition("].")[2] if place.startswith("stages[") else _option_of(place)
    return key.startswith("until_") or row_of(key).on_resume != FREE


def _mixes(place: str, pair: tuple[Any, Any]) -> bool:
    """Return whether a changed option decides which text is read."""
    held = place == "data.valid" and held_out(pair[0]) != held_out(pair[1])
    return held or place == "data.train" or "data.sources" in place


def _option_of(place: str) -> str:
    """Return the option of a place: `stages` for a place inside stages."""
    return place.partition("[")[0]


def _permission(places: Iterable[str], config: Mapping[str, Any]) -> str:
    """Return a hint how to permit changes of these places; "" if one cannot change, or there are none."""
    options = set(map(_option_of, places))
    keys, fixed = options - {"data"}, {"tokenizer"}
    fixed |= {"model.seq_len"} if config["model.position"] == "learned" else set()
    if not options or keys & fixed or any(row_of(key).on_resume for key in keys):
        return ""
    return f", or allow it with --allow-change {','.join(sorted(keys or {'data'}))}"


def new_rows(found: Manifest, ours: Manifest) -> int:
    """Return the number of vocabulary rows that a checkpoint lacks."""
    known = found.config.get("model.vocab")
    return ours.config["model.vocab"] - known if type(known) is int else 0


def _with_rows_of(found: Manifest, ours: Manifest) -> dict[str, list[int]]:
    """Return {parameter: shape} of this model, but with the checkpoint's number of vocabulary rows."""
    more, fewer = ours.config["model.vocab"], found.config["model.vocab"]

    def shape(name: str, own: list[int]) -> list[int]:
        return [fewer, *own[1:]] if own[:1] == [more] and found.shapes.get(name, [])[:1] == [fewer] else own

    return {name: shape(name, own) for name, own in ours.shapes.items()}


def begin(trainer: Trainer, found: Manifest, start: Start, owed: Mapping[str, Any] | None) -> None:
    """Set a trainer to begin with the loaded checkpoint.

    Args:
        owed: the row of the step that the run resumes from, if an earlier job has not written it.
    """
    load, progress = taken(found, start.load), found.progress
    age = progress.moments_age if progress is not None and load != "weights" else 0
    averaged = AVERAGE in found.kinds and load != "weights"
    if load == "all":
        trainer.begin(age, found.step, progress, owed, averaged=averaged)
        trainer.checkpoints.saved = found.step if start.own else None
    else:
        trainer.begin(age, averaged=averaged)


def described(found: Manifest, start: Start, ours: Manifest) -> str:
    """Return the end of the run's first line, which says where it begins."""
    path, load = start.store.path(found.step), taken(found, start.load)
    if load == "optimizer":
        return f", beginning with weights and moments of {path}"
    if load == "weights":
        rows = new_rows(found, ours)
        fresh = f" and initial values in {rows:,} new rows of the vocabulary" if rows else ""
        return f", beginning with the weights of {path}{fresh}"
    said = "" if found.progress is None else changes(found, ours.config)
    return f", going on from {path}" + (f" with {said}" if said else "")


def doubt(found: Manifest, start: Start, ours: Manifest) -> str | None:
    """Return a warning if weights are loaded that belong to another tokenizer; None: there is no sign of it."""
    digests = found.identity.get("tokenizer"), ours.identity["tokenizer"]
    if taken(found, start.load) == "all" or None in digests or digests[0] == digests[1]:
        return None
    return f"{start.store.path(found.step)}: its tokenizer differs from data.tokenizer: the same ids mean other text"


def changes(found: Manifest, config: Mapping[str, Any]) -> str:
    """Return a text of the options in `_SAID` that differ from the checkpoint's; "" if none does."""
    unused = () if config["schedule.decay"].startswith("wsd") else ("schedule.cooldown",)
    said = differences(saved_options(found), config).items()
    return _some({k: v for k, v in said if any(fnmatch(k, name) for name in _SAID) and k not in unused})


def _free(config: Mapping[str, Any]) -> set[str]:
    """Return the model options that its weights do not depend on."""
    grows = {"model.seq_len"} if config["model.position"] == "rotary" else set()
    return {f"model.{name}" for name in ("dropout", "loss_chunk", "z_loss", "init_std", "init_depth")} | grows


def _some(found: Mapping[str, tuple[Any, Any]]) -> str:
    texts = [f"{key} {old} -> {new}" for key, (old, new) in found.items()]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def check_kernels(names: Sequence[str]) -> None:
    """Refuse ranks that have chosen other kernels than rank 0. Raises UserError 114.

    Args:
        names: of the kernels of each rank, in rank order.
    """
    if odd := [rank for rank, name in enumerate(names) if name != names[0]]:
        what = f"rank {odd[0]} has {names[odd[0]]} kernels, rank 0 {names[0]}: sums would differ"
        raise UserError(114, what, "use precision.kernels=reference, or the same compiler on all hosts")
