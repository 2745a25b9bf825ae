"""Show what steps do with each unit of parameters, in a table once in some steps.

A unit tells five kinds of events (`zero/unit.py`):

    gather    its parameters are asked for        gathered   they are there        released   they are freed
    reduce    its gradients begin to be summed    reduced    the sum is there

The table counts them since it was drawn last, with the bytes of gathered parameters and of gradients that are there
now, and the seconds that the host was busy with its messages or waited for them (the ledger's). Values that rest whole
are never gathered, and count as there.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TextIO

from megazero.base.terminal import in_columns
from megazero.observe.numbers import Value

GATHERED, RELEASED, REDUCED = "gathered", "released", "reduced"
_HEADS = ("unit", "gathered", "released", "reduced", "MB now", "seconds waited")


class Watched(Protocol):
    """A unit that tells its events."""

    on_event: Callable[[str], object]

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def visiting_bytes(self) -> int:
        """Return the bytes of its values that are there for a while."""
        ...


class UnitEvents:
    """The events of a rank's units, while somebody looks.

    Args:
        units: in forward order.
        seconds: of each unit by kind, growing: `Ledger.seconds`.
    """

    def __init__(self, units: Sequence[Watched], seconds: Mapping[str, Mapping[str, float]]):
        self._units, self._seconds = units, seconds
        self._counts: Counter[tuple[str, str]] = Counter()
        self._waited = self._waited_by_now()

    def listen(self, *, on: bool = True) -> None:
        """Let the units tell their events from now on, or not any more."""
        for unit in self._units:
            unit.on_event = partial(self._add, unit) if on else lambda event: None
        self._counts.clear()
        self._waited = self._waited_by_now()

    def table(self) -> str:
        """Return the table of what happened since the last one."""
        waited = self._waited_by_now()
        rows: list[tuple[str, ...]] = [_HEADS]
        for unit in self._units:
            counts = (f"{self._counts[unit.name, kind]:,}" for kind in (GATHERED, RELEASED, REDUCED))
            spent = waited[unit.name] - self._waited[unit.name]
            rows.append((unit.name, *counts, f"{unit.visiting_bytes / 1e6:,.2f}", f"{spent:.4f}"))
        self._counts.clear()
        self._waited = waited
        return "\n".join(in_columns(rows))

    def _add(self, unit: Watched, kind: str) -> None:
        self._counts[unit.name, kind] += 1

    def _waited_by_now(self) -> dict[str, float]:
        return {unit.name: sum(self._seconds.get(unit.name, {}).values()) for unit in self._units}


class UnitTableSink:
    """A sink that writes the table with each row.

    Args:
        stream: the output; None (standard output was closed before we started): write nothing.
    """

    def __init__(self, events: UnitEvents, stream: TextIO | None):
        self._events, self._stream = events, stream

    def start(self) -> None:
        """Let the units tell from the first step on."""
        self._events.listen()

    def row(self, row: Mapping[str, Value]) -> None:
        """Write the table of the steps since the last row. Raises OSError: the stream was closed."""
        if self._stream is not None:
            print(self._events.table(), file=self._stream, flush=True)

    def close(self) -> None:
        """Let the units tell nothing any more."""
        self._events.listen(on=False)
