"""Pass rows to sinks, with one promise: no sink ever stops or slows training.

A sink takes rows and is closed once. Rows are for people and their tools; the weights do not depend on them. So a full
log disk, a closed terminal or a broken package costs some rows, one line on stderr, and nothing else: `Sinks` passes
each row to every sink, catches what a sink raises, warns once per sink and goes on. The next row is tried again,
because disks get emptied.
"""

from collections.abc import Callable, Mapping, Sequence

from megazero.base.answers import warn
from megazero.observe.numbers import Value


class Sink:
    """A destination of metrics rows, whose floats may not be finite; this one drops them.

    Before `start` it writes nothing anywhere: a run that has nothing to do does not start its sinks.
    """

    def start(self) -> None:
        """Prepare for rows; most sinks have nothing to prepare."""

    def row(self, row: Mapping[str, Value]) -> None:
        """Write one row."""

    def close(self) -> None:
        """Write rows that are still buffered; most sinks buffer none."""


class Sinks:
    """A sink that passes every row to every sink, whatever the others do."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = list(sinks)
        self._warned: set[int] = set()  # indices in the list, because two sinks may have the same class

    def start(self) -> None:
        """Start every sink. Never raises an `Exception`."""
        self._each(lambda sink: sink.start())

    def row(self, row: Mapping[str, Value]) -> None:
        """Pass one row to every sink. Never raises an `Exception`."""
        self._each(lambda sink: sink.row(row))

    def close(self) -> None:
        """Close every sink. Never raises an `Exception`; a second call does nothing."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, call: Callable[[Sink], None]) -> None:
        for place, sink in enumerate(self._sinks):
            try:
                call(sink)
            except Exception as error:  # whatever a sink's library raises, training goes on
                if place not in self._warned:
                    self._warned.add(place)
                    what = f"{type(sink).__name__}: {type(error).__name__}: {error}"
                    warn(f"{what}; training goes on, rows may be missing there")
