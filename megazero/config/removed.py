"""Options that earlier versions had. An old config.yaml may name one only with the value that changed nothing."""

from collections.abc import Iterator
from typing import Any

# Each option: the value that changed nothing, and what to do instead.
REMOVED: dict[str, tuple[Any, str]] = {
    "zero.tile_mb": (None, "split large weights over ranks with parallel.tensor"),
}


def drop_removed(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Delete removed options from nested values; yield (option, what to do instead) of each that had an effect."""
    for key, (neutral, do) in REMOVED.items():
        *sections, last = key.split(".")
        inner: Any = values
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last in inner and inner.pop(last) != neutral:
            yield key, do
