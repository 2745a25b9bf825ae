"""Options that earlier versions had. An old config.yaml may name one only with the value that changed nothing."""

from collections.abc import Iterator
from typing import Any

# Each option ([] stands for every item of a list): the values that changed nothing, and what to do instead.
_FINISHED = "name a folder of finished shards"
REMOVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero.tile_mb": ((None,), "split large weights over ranks with parallel.tensor"),
    "data.sources[].grows": ((None, False), _FINISHED),
    "stages[].data.sources[].grows": ((None, False), _FINISHED),
}


def drop_removed(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Delete removed options from nested values; yield (option, what to do instead) of each that had an effect."""
    for key, (neutral, do) in REMOVED.items():
        *sections, last = key.split(".")
        if any(found.pop(last) not in neutral for found in _inside(values, sections) if last in found):
            yield key.replace("[]", ""), do


def _inside(values: Any, sections: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the mappings at a path of sections, those that are there."""
    if not isinstance(values, dict):
        return
    if not sections:
        yield values
        return
    first, *rest = sections
    inner = values.get(first.removesuffix("[]"))
    for one in (inner or ()) if first.endswith("[]") and isinstance(inner, list | tuple) else [inner]:
        yield from _inside(one, rest)
