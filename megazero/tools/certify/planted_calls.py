"""Plant a fault by changing a rank's objects: replace a value, or a method by another function.

`where` (`itself`, `units` or `block`) returns objects of the rig; `path` is the attribute path from each of them to the
value or method. A path that does not exist is an error: the layout has no such object.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from megazero.tools.certify.training import Plant, Rig
from megazero.zero.unit import Unit

Where = Callable[[Rig], Iterable[object]]


def itself(rig: Rig) -> list[Rig]:
    """Return the rig."""
    return [rig]


def units(rig: Rig) -> list[Unit]:
    """Return all units of the rank."""
    return list(rig.built.engine.units)


def block(rig: Rig) -> list[Unit]:
    """Return the unit of the first block."""
    return [unit for unit in units(rig) if unit.layout.name == "blocks.0"]


def _put(where: Where, path: str, other: Callable[[Any, Any], object]) -> Plant:
    """Return the fault that replaces a value by `other(holder, value)`."""
    way, _, name = path.rpartition(".")

    def plant(rig: Rig) -> None:
        for each in where(rig):
            holder = attrgetter(way)(each) if way else each
            object.__setattr__(holder, name, other(holder, getattr(holder, name)))  # works on frozen objects too

    return plant


def changed(where: Where, path: str, change: Callable[[Any], object]) -> Plant:
    """Return the fault that replaces a value by `change(value)`."""
    return _put(where, path, lambda _, value: change(value))


def instead(where: Where, path: str, wrong: Callable[..., Any]) -> Plant:
    """Return the fault that calls `wrong(holder, right, *arguments)` instead of a method `right(*arguments)`."""
    return _put(where, path, lambda holder, right: partial(wrong, holder, right))


def before(where: Where, path: str, wrong: Callable[..., Any]) -> Plant:
    """Return the fault that calls `wrong(holder, *arguments)` before each call of a method."""

    def both(holder: object, right: Callable[..., Any], *given: Any, **options: Any) -> Any:
        wrong(holder, *given, **options)
        return right(*given, **options)

    return instead(where, path, both)


def after(where: Where, path: str, wrong: Callable[..., Any]) -> Plant:
    """Return the fault that calls `wrong(holder, *arguments)` after each call of a method."""

    def both(holder: object, right: Callable[..., Any], *given: Any, **options: Any) -> Any:
        done = right(*given, **options)
        wrong(holder, *given, **options)
        return done

    return instead(where, path, both)


def in_codes(path: str, operation: str, wrong: Callable[..., None]) -> Plant:
    """Return the fault that calls `wrong(right, *arguments)` for an operation of the first block's `path`.ops."""

    def with_wrong(ops: Any) -> Any:
        return replace(ops, **{operation: partial(wrong, getattr(ops, operation))})

    return changed(block, f"{path}.ops", with_wrong)
