"""Begin a run with a part of a checkpoint, by `checkpoint.load`, and check what must be the same for that.

    load        of the checkpoint                                  what begins again
    all         everything: the run goes on                        nothing
    optimizer   weights, both moments, and how many updates those  step, learning rate, data, loss scale
                have seen
    weights     weights                                            the same, and the moments with their count

With weights alone `model.vocab` may be larger: rows that the checkpoint lacks keep the values that a new run of this
seed has there. Moments do not go with them: one count of updates corrects all of them, and new rows would have none.

It applies to the start from another run only. From steps in its own folder a run goes on with everything, so that a
line with `checkpoint.load` can be started again and again. An import has weights alone, whatever is asked for.

Adam corrects its moments for having begun at zero, by 1 / (1 - beta^n) with n the updates they have seen. Moments that
are carried over keep their n (`Progress.carried`): counted again they would be taken for 1 / (1 - beta) times what they
are. The learning rate counts the new run's updates.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from megazero.base.errors import UserError
from megazero.checkpoint.manifest import Manifest
from megazero.checkpoint.shard import DTYPES, NAMES
from megazero.config.changes import FREE, row_of
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.run.checkpointing import CheckpointMetadata, plain
from megazero.run.history import changed_since, differences, held_out, saved_options
from megazero.run.resume import Start
from megazero.train.trainer import Trainer

# What may be another, and then changes what is computed: said when a run goes on.
_SAID = (
    *("run.steps", "optimizer.*", "schedule.*", "zero.grad_dtype", "zero.reduce_dtype"),
    *("zero.quantize.*", "zero.offload.delayed", "precision.kernels"),
)


def taken(manifest: Manifest, load: str) -> str:
    """Return what is taken of a checkpoint: `load`, but only weights of one that is an import without a run."""
    return "weights" if manifest.progress is None else load


def check_same(manifest: Manifest, about: CheckpointMetadata, where: Path, load: str = "all") -> None:
    """Refuse a checkpoint of another model, or what is to be taken of it, of other data or another optimizer.

    Raises:
        UserError: 412, with what differs, the checkpoint's value first.
    """
    if manifest.progress is None and load == "optimizer":
        raise UserError(412, "holds weights alone, no moments", "give checkpoint.load=weights", where=where)
    load = taken(manifest, load)
    if load != "weights" and manifest.kinds != list(about.kinds):
        what = f"expected the state {list(about.kinds)} of this optimizer, got {manifest.kinds}"
        raise UserError(412, what, "give checkpoint.load=weights", where=where)
    other = _others(manifest, about, load)
    grows = new_rows(manifest, about.config) > 0
    grown, do = (
        grows and load == "weights",
        f"resume with the config it was made with{_permission(other, about.config)}",
    )
    if grown:
        del other["model.vocab"]
    if not other and (name := manifest.other_shape(_with_rows_of(manifest, about) if grown else about.shapes)):
        other = {name: (manifest.shapes.get(name), about.shapes.get(name))}
    if not other and not _fits(manifest.dtype, about.dtype, load):
        other = {"dtype": (manifest.dtype, NAMES[about.dtype])}
    if other:
        what = "is not of this run" if load == "all" else "is not of this model"
        do = do if load == "all" else "load it with the model it was made with"
        do += ", or begin a run with checkpoint.load=weights, where a vocabulary may grow" if grows != grown else ""
        raise UserError(412, f"{what} (its -> this): {_some(other)}", do, where=where)
    consumed = Course(about.config, about.history).samples(manifest.step)
    if load == "all" and manifest.progress is not None and manifest.progress.next_sample != consumed:
        what = f"has consumed {manifest.progress.next_sample:,} samples, with these options it would be {consumed:,}"
        raise UserError(412, what, "resume with the config it was made with", where=where)


def _others(manifest: Manifest, about: CheckpointMetadata, load: str) -> dict[str, tuple[Any, Any]]:
    """Return what is another than in a checkpoint and must not be, by its place: (its value, this run's)."""
    theirs, ours = saved_options(manifest), plain(about.config)
    changed = {change["key"] for change in changed_since(manifest, about.history)}
    found = differences({key: theirs.get(key) for key in ours}, ours)
    found = {place: pair for place, pair in found.items() if _option_of(place) not in changed}
    other = {place: pair for place, pair in found.items() if _must_stay(place, load, about.config)}
    if load == "all":
        digests = {"data": about.data, "tokenizer": about.tokenizer}
        identity = {key: (manifest.identity.get(key), own) for key, own in digests.items()}
        other |= {key: pair for key, pair in identity.items() if pair[0] != pair[1] and key not in changed}
        if "data" in other and (mix := {place: pair for place, pair in found.items() if _mixes(place, pair)}):
            del other["data"]
            other |= mix
    return other


def _must_stay(place: str, load: str, config: Config) -> bool:
    """Return whether an option must be as in the checkpoint; what is trained on is a matter of the data's digest."""
    if load != "all":  # moments are means of squares by betas
        betas = load == "optimizer" and place == "optimizer.betas"
        return betas or (place.startswith("model.") and place not in _free(config))
    if "data.sources" in place or place in ("data.train", "data.valid", "data.tokenizer"):
        return False
    key = place.partition("].")[2] if place.startswith("stages[") else _option_of(place)
    return key.startswith("until_") or row_of(key).on_resume != FREE


def _mixes(place: str, pair: tuple[Any, Any]) -> bool:
    """Return whether an option decides which text is read."""
    held = place == "data.valid" and held_out(pair[0]) != held_out(pair[1])
    return held or place == "data.train" or "data.sources" in place


def _option_of(place: str) -> str:
    """Return the option of a place: `stages` for a place inside stages."""
    return place.partition("[")[0]


def _permission(places: Iterable[str], config: Config) -> str:
    """Return how the options of some places may be others, in words; "" where one may not."""
    keys = set(map(_option_of, places)) - {"data"}
    fixed = {"tokenizer"} | ({"model.seq_len"} if config.model.position == "learned" else set())
    if keys & fixed or any(row_of(key).on_resume for key in keys):
        return ""
    return f", or take it by --allow-change {','.join(sorted(keys or {'data'}))}"


def new_rows(manifest: Manifest, config: Config) -> int:
    """Return the rows of a vocabulary that a checkpoint lacks: tokens that it knows none of."""
    known = manifest.config.get("model.vocab")
    return config.model.vocab - known if type(known) is int else 0


def _with_rows_of(manifest: Manifest, about: CheckpointMetadata) -> dict[str, list[int]]:
    """Return the shapes of this model with the rows of a checkpoint's vocabulary."""
    ours = about.config.model.vocab
    theirs = ours - new_rows(manifest, about.config)

    def shape(name: str, own: list[int]) -> list[int]:
        grown = own[:1] == [ours] and manifest.shapes.get(name, [])[:1] == [theirs]
        return [theirs, *own[1:]] if grown else own

    return {name: shape(name, own) for name, own in about.shapes.items()}


def begin(trainer: Trainer, found: Manifest, start: Start, owed: Mapping[str, Any] | None) -> None:
    """Set a trainer to begin with what has been loaded.

    Args:
        owed: the row of the step to go on from, where an earlier job has left it unwritten.
    """
    load, progress = taken(found, start.load), found.progress
    age = progress.moments_age if progress is not None and load != "weights" else 0
    if load == "all":
        trainer.begin(age, found.step, progress, owed)
        trainer.checkpoints.saved = found.step if start.own else None
    else:
        trainer.begin(age)


def described(found: Manifest, start: Start, about: CheckpointMetadata) -> str:
    """Return what the run's first line says of where it begins."""
    path, load = start.store.path(found.step), taken(found, start.load)
    if load == "optimizer":
        return f", beginning with weights and moments of {path}"
    if load == "weights":
        rows = new_rows(found, about.config)
        fresh = f" and initial values in {rows:,} new rows of the vocabulary" if rows else ""
        return f", beginning with the weights of {path}{fresh}"
    said = "" if found.progress is None else changes(found, about.config)
    return f", going on from {path}" + (f" with {said}" if said else "")


def doubt(found: Manifest, start: Start, about: CheckpointMetadata) -> str | None:
    """Return a warning where weights are taken whose tokens meant something else; None: there is no sign of it."""
    theirs, ours = found.identity.get("tokenizer"), about.tokenizer
    if taken(found, start.load) == "all" or None in (theirs, ours) or theirs == ours:
        return None
    return f"{start.store.path(found.step)}: its tokenizer is another than data.tokenizer: the same ids mean other text"


def changes(manifest: Manifest, config: Config) -> str:
    """Return what is allowed to be another than when the checkpoint was written, and is; "" for nothing."""
    unused = () if config.schedule.decay == "wsd" else ("schedule.cooldown",)
    found = differences(saved_options(manifest), plain(config))
    said = [key for key in found if any(fnmatch(key, name) for name in _SAID) and key not in unused]
    return _some({key: found[key] for key in said})


def _free(config: Config) -> set[str]:
    """Return the options of a model that its weights do not depend on."""
    return {"model.dropout"} | ({"model.seq_len"} if config.model.position == "rotary" else set())


def _fits(theirs: str, ours: torch.dtype, load: str) -> bool:
    """Return whether values are loaded without rounding; a run that goes on has the same dtype."""
    found = DTYPES[theirs]
    return found == ours or (load != "all" and (found, ours) == (torch.float32, torch.float64))


def _some(found: Mapping[str, tuple[Any, Any]]) -> str:
    texts = [f"{key} {old} -> {new}" for key, (old, new) in found.items()]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def check_kernels(names: Sequence[str]) -> None:
    """Refuse ranks that have chosen other kernels than rank 0. Raises UserError 114."""
    if odd := [rank for rank, name in enumerate(names) if name != names[0]]:
        what = f"rank {odd[0]} has {names[odd[0]]} kernels, rank 0 {names[0]}: sums would differ"
        raise UserError(114, what, "give precision.kernels=reference, or the same compiler to all hosts")
