"""Record the options that were changed when a run resumed: `--allow-change`, and the history in manifests.

A run resumes with the options it was made with; `--allow-change` names those that may differ from the resumed step on
(`config/changes.py` says which can). The manifests of later steps record each change as {step, key, from, to}: `to`
holds after that step. From these changes the course of the run (`config/stages.py`) is derived: which samples were
consumed, and how many tokens. A change of key `data` has the digests of the data before and after.

A source is identified by its name. A source of the same name continues where it was, whatever its files are. A source
that the config does not name any more keeps its share of the past, and its files are not opened again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megazero.checkpoint.manifest import Manifest
from megazero.config.changes import row_of
from megazero.config.flat import plain
from megazero.config.permitted import is_permitted
from megazero.config.schema import Config

# Options that decide which samples are read, and in which order.
_ORDER = ("data.sources", "data.train", "stages", "batch.global", "model.seq_len")


def accounted_for(
    manifest: Manifest, config: Config, allowed: Sequence[str]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return (all changes of options, oldest first; the saved step's data digest if other data may follow, else None).

    Args:
        allowed: what `--allow-change` names.
    """
    new = list(changes_of(manifest, config, allowed))
    explained = "data" in allowed or any(change["key"] in _ORDER for change in new)
    is_fixed = held_out(manifest.config.get("data.valid")) != held_out(config.data.valid)
    return [*manifest.history, *new], manifest.identity.get("data") if explained and not is_fixed else None


def changes_of(manifest: Manifest, config: Config, allowed: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Yield the permitted differences of a config from that of a saved step.

    Args:
        allowed: options and sections; None: all that can change.
    """
    theirs = saved_options(manifest)
    for key, after in plain(config).items():
        before = theirs.get(key)
        may = not row_of(key).on_resume if allowed is None else is_permitted(key, allowed)
        if key == "model.seq_len" and config.model.position == "learned":
            may = False
        if may and before != after:
            yield {"step": manifest.step, "key": key, "from": before, "to": after}


def saved_options(manifest: Manifest) -> dict[str, Any]:
    """Return the flat config of a saved step with today's options: new ones have defaults, removed ones are dropped."""
    return {key: manifest.config.get(key, default) for key, default in plain(Config()).items()}


def changed_since(found: Manifest | None, history: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the changes of a history that a checkpoint does not have; none without a checkpoint."""
    return [] if found is None else history[len(found.history) :]


def in_words(changes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a text for each change."""
    explained = any(change["key"] in _ORDER for change in changes)
    for key, old, new in ((change["key"], change["from"], change["to"]) for change in changes):
        if key != "data":
            found = differences({key: old}, {key: new})
            yield from (f"{place} {_shown(a)} -> {_shown(b)}" for place, (a, b) in found.items())
            yield from () if found else (f"{key} in another order",)
        elif not explained:
            yield "data: other text under the same names"


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (theirs, ours) for all places in which two flat configs differ, in JSON's types.

    A place is an option, or a value in a list of sections: `stages[0].batch.global`, `data.sources[NAME].weight`.
    """
    old, new = dict(_places(theirs, "")), dict(_places(ours, ""))
    return {place: (old.get(place), new.get(place)) for place in {**new, **old} if old.get(place) != new.get(place)}


def _places(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not place):
        for key, inner in value.items():
            yield from _places(inner, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, inner in enumerate(value):
            named = "match" not in inner  # groups of parameters have no names, and their order counts
            rest = {key: each for key, each in inner.items() if key != "name" or not named}
            yield from _places(rest, f"{place}[{inner.get('name', number) if named else number}]")
    else:
        yield place, value


def _shown(value: Any) -> str:
    """Return a value as text, cut to 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def held_out(valid: Any) -> Any:
    """Return the share of documents that is held out of training; None: none."""
    return valid if isinstance(valid, float) else None
