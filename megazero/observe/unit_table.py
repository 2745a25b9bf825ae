"""Show what a step does with each unit of parameters: a table once in some steps, a timeline of one step on demand.

A unit tells five kinds of events (`zero/unit.py`):

    gather    its parameters are asked for        gathered   they are there        released   they are freed
    reduce    its gradients begin to be summed    reduced    the sum is there

The table counts them since it was drawn last, with the bytes of gathered parameters and of gradients that are there
now, and the seconds that the host was busy with its messages or waited for them (the ledger's). Values that rest whole
are never gathered, and count as there.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

from megazero.base.picture import picture
from megazero.base.terminal import in_columns
from megazero.observe.numbers import Value

GATHER, GATHERED, RELEASED, REDUCE, REDUCED = "gather", "gathered", "released", "reduce", "reduced"
_HEADS = ("unit", "gathered", "released", "reduced", "MB now", "seconds waited")
_SPANS: tuple[tuple[str, str, str, str], ...] = (  # first event, last event, what it is called, its colour
    (GATHER, GATHERED, "coming", "#c9d7ea"),
    (GATHERED, RELEASED, "there", "#3f6fb0"),
    (REDUCE, REDUCED, "reduced", "#e08a2c"),
)


@dataclass(frozen=True)
class UnitEvent:
    """Something that happened to a unit.

    Attributes:
        second: on the host's clock.
        unit: its name.
        kind: see the module.
    """

    second: float
    unit: str
    kind: str


class Watched(Protocol):
    """A unit that tells its events."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def visiting_bytes(self) -> int:
        """Return the bytes of its values that are there for a while."""
        ...

    def listen(self, listener: Callable[[str], object]) -> None:
        """Let `listener` be called with each event."""
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
        self._recorded: list[UnitEvent] | None = None
        self._listens = False

    def listen(self, *, on: bool = True) -> None:
        """Let the units tell their events from now on, or not any more."""
        for unit in self._units:
            unit.listen(partial(self._add, unit) if on else lambda event: None)
        self._listens = on
        self._counts.clear()
        self._waited = self._waited_by_now()

    @contextmanager
    def recording(self) -> Iterator[list[UnitEvent]]:
        """Yield the list to which every event inside the context is added."""
        counted = self._listens
        self._recorded = events = []
        if not counted:
            self.listen()
        try:
            yield events
        finally:
            self._recorded = None
            if not counted:
                self.listen(on=False)

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

    def draw(self, path: Path, events: Sequence[UnitEvent]) -> None:
        """Draw the timeline of what was recorded. Raises OSError."""
        draw_timeline(path, events, [unit.name for unit in self._units])

    def _add(self, unit: Watched, kind: str) -> None:
        self._counts[unit.name, kind] += 1
        if self._recorded is not None:
            self._recorded.append(UnitEvent(time.perf_counter(), unit.name, kind))

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


def draw_timeline(path: Path, events: Sequence[UnitEvent], units: Sequence[str]) -> None:
    """Draw when each unit was on its way, there, and reduced, in one step. Raises OSError.

    Args:
        events: of the step, in their order.
        units: all, in forward order.
    """
    first = events[0].second if events else 0.0
    last = events[-1].second if events else 0.0
    with picture(path, 9.0, 1.2 + 0.28 * len(units)) as figure:
        axes = figure.add_subplot()
        for row, unit in enumerate(units):
            own = [event for event in events if event.unit == unit]
            for begin, end, _, colour in _SPANS:
                height = 0.35 if begin == REDUCE else 0.8
                spans = [(1e3 * (a - first), 1e3 * (b - a)) for a, b in _between(own, begin, end, last)]
                axes.broken_barh(spans, (row - height / 2, height), color=colour)
        axes.set_yticks(range(len(units)), units)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        for _, _, name, colour in _SPANS:
            axes.plot([], [], color=colour, linewidth=6, label=name)
        figure.legend(loc="outside upper right", ncols=len(_SPANS), frameon=False)


def _between(events: Sequence[UnitEvent], begin: str, end: str, last: float) -> list[tuple[float, float]]:
    """Return the seconds from each event of one kind to the next one of another, or to the last of the step."""
    found, since = [], None
    for event in events:
        if event.kind == begin and since is None:
            since = event.second
        elif event.kind == end and since is not None:
            found.append((since, event.second))
            since = None
    return found if since is None else [*found, (since, last)]
