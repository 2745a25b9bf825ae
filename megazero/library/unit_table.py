"""Show what steps do with each unit of parameters, as a table.

A unit reports five kinds of events (`zero/unit.py`):

    gather    its parameters are requested        gathered   they are present      released   they are freed
    reduce    its gradients begin to be summed    reduced    the sum is ready

The table counts them since the last table, with the bytes of gathered parameters and of gradients that are present,
and the seconds, from the ledger, that the host spent on the unit's messages or waited for them. Values that each
rank keeps whole between steps are not in these bytes. torch's profiler has the times within a step (`observe.profile`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from megazero.base.terminal import in_columns
from megazero.zero.unit import Unit

GATHERED, RELEASED, REDUCED = "gathered", "released", "reduced"
_HEADS = ("unit", GATHERED, RELEASED, REDUCED, "MB now", "seconds waited")


class UnitEvents:
    """The events of a rank's units, counted after `listen`.

    Args:
        units: in forward order.
        seconds: `Ledger.seconds`, {unit: {kind of work: the host's seconds so far}}.
    """

    def __init__(self, units: Sequence[Unit], seconds: Mapping[str, Mapping[str, float]]):
        self._units, self._seconds = units, seconds
        self._restart()

    def listen(self, *, on: bool = True) -> None:
        """Start, or stop, counting the events of the units."""
        for unit in self._units:
            unit.listen(partial(self._add, unit.name) if on else lambda event: None)
        self._restart()

    def table(self) -> str:
        """Return the table of the events since the last one."""
        rows: list[tuple[str, ...]] = [_HEADS]
        for unit in self._units:
            counts = (f"{self._counts[unit.name, kind]:,}" for kind in (GATHERED, RELEASED, REDUCED))
            spent = self._waited_by_now(unit) - self._waited[unit.name]
            rows.append((unit.name, *counts, f"{unit.visiting_bytes / 1e6:,.2f}", f"{spent:.4f}"))
        self._restart()
        return "\n".join(in_columns(rows))

    def _restart(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._waited = {unit.name: self._waited_by_now(unit) for unit in self._units}

    def _add(self, unit: str, kind: str) -> None:
        self._counts[unit, kind] += 1

    def _waited_by_now(self, unit: Unit) -> float:
        return sum(self._seconds.get(unit.name, {}).values())
