"""Keep account of the options that were changed when a run went on: `--allow-change`, and the history in manifests.

A run goes on with the options it was made with; `--allow-change` names those that may be others from the step on with
which it goes on (`config/changes.py` says which can). The manifests of later steps have each change as {step, key,
from, to}: `to` holds behind that step. With them the course of the run (`config/stages.py`) is what it was: which
samples were consumed, and how many tokens. A change of key `data` is one of what is read, by its digests.

A source is its name. Under the same name it goes on where it was, whatever its files are; one that is not named any
more has given its share, and its files are not opened again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megazero.checkpoint.manifest import Manifest
from megazero.config.changes import in_json, is_permitted, row_of
from megazero.config.flat import flatten
from megazero.config.schema import Config

# What older checkpoints do not say.
_BEFORE = {f"zero.quantize.{kind}": "none" for kind in ("parameters", "gradients")} | {"data.pack": False}
# Options of which other values have other samples, or the same ones in another order.
_ORDER = ("data.sources", "data.train", "stages", "batch.global", "model.seq_len")


def accounted_for(
    manifest: Manifest, config: Config, allowed: Sequence[str]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the history that a config has behind a step, and the digest of its data where other data are allowed.

    Args:
        allowed: what `--allow-change` names.
    """
    new = list(changes_of(manifest, config, allowed))
    explained = "data" in allowed or any(change["key"] in _ORDER for change in new)
    is_fixed = held_out(manifest.config.get("data.valid")) != held_out(config.data.valid)
    return [*manifest.history, *new], manifest.identity.get("data") if explained and not is_fixed else None


def changes_of(manifest: Manifest, config: Config, allowed: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Yield what is another in a config than when a step was saved, and may be.

    Args:
        allowed: options and sections; None: all.
    """
    theirs = saved_options(manifest)
    for key, value in flatten(config).items():
        before, after = in_json(theirs.get(key)), in_json(value)
        may = not row_of(key).on_resume if allowed is None else is_permitted(key, allowed)
        if key == "model.seq_len" and config.model.position == "learned":
            may = False
        if may and before != after:
            yield {"step": manifest.step, "key": key, "from": before, "to": after}


def saved_options(manifest: Manifest) -> dict[str, Any]:
    """Return the flat config with which a step was saved, with the options that older manifests lack."""
    return _BEFORE | manifest.config


def changed_since(found: Manifest | None, history: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the changes of a history that a checkpoint does not have; none where a run begins with no checkpoint."""
    return [] if found is None else history[len(found.history) :]


def in_words(changes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield changes as one says them."""
    explained = any(change["key"] in _ORDER for change in changes)
    for change in changes:
        if change["key"] != "data":
            yield from difference(change["key"], change["from"], change["to"])
        elif not explained:
            yield "data: other text under the same names"


def difference(key: str, old: Any, new: Any) -> Iterator[str]:
    """Yield what two values of an option differ in: of lists of sources each source, of stages each option."""
    if key.endswith("data.sources"):
        place, before, after = key.removesuffix("data.sources"), _by_name(old), _by_name(new)
        found = list(_of_sources(before, after)) or ["sources in another order"]
        yield from (f"{place.removesuffix('.')} {text}".lstrip() for text in found)
    elif key == "stages":
        before, after = dict(options_of_stages(old)), dict(options_of_stages(new))
        for each in {**before, **after}:
            if before.get(each) != after.get(each):
                yield from difference(each, before.get(each), after.get(each))
    else:
        yield f"{key} {shown(old)} -> {shown(new)}"


def other_mix(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return in what two flat configs differ that decides which text is read, in words."""

    def mix(config: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: config.get(key) for key in ("data.train", "data.sources")}
        in_stages = options_of_stages(config.get("stages"))
        found |= {place: value for place, value in in_stages if place.endswith("data.sources")}
        return found | {"data.valid": held_out(config.get("data.valid"))}

    old, new = mix(theirs), mix(ours)
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [text for key in differing for text in difference(key, old.get(key), new.get(key))]


def _by_name(sources: Any) -> dict[str, Mapping[str, Any]]:
    return {source["name"]: source for source in sources or ()}


def _of_sources(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, source in new.items():
        if name in old:
            pairs = {key: (old[name].get(key), source.get(key)) for key in ("path", "weight")}
            changed = {key: [f"{v:g}" if key == "weight" else v for v in pair] for key, pair in pairs.items()}
            yield from (f"source {name}: {key} {was} -> {now}" for key, (was, now) in changed.items() if was != now)
        else:
            yield f"source {name} added, weight {source['weight']:g}"
    yield from (f"source {name} removed" for name in old if name not in new)


def options_of_stages(stages: Sequence[Mapping[str, Any]] | None) -> Iterator[tuple[str, Any]]:
    """Yield what stages say, in JSON's types, by place: `stages[0].batch.global`."""
    for number, stage in enumerate(stages or ()):
        for section, given in stage.items():
            for name, value in given.items() if isinstance(given, dict) else [("", given)]:
                yield f"stages[{number}].{section}.{name}".rstrip("."), value


def shown(value: Any) -> str:
    """Return a value, and of a long one its beginning."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def held_out(valid: Any) -> Any:
    """Return the share of documents that is held out of training."""
    return valid if isinstance(valid, float) else None
