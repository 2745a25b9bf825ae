"""Count a rank's traffic (operations, elements and bytes by axis and purpose), its memory, and its time by unit.

Elements are those that a ring algorithm sends, whatever algorithm runs, so that they can be compared with the papers'
figures. For N ranks and n elements of the full tensor (padded to a multiple of N):

    all-reduce                    2 n (N - 1) / N
    reduce-scatter, all-gather      n (N - 1) / N
    broadcast                       n            (by the source)
    point to point                  n

(Patarasuk and Yuan 2009; the ZeRO paper, section 7.) Bytes are elements times item size.

Memory that lives longer than a step is counted where it is allocated. Times are wall times in which the host is busy
with an operation or waits for it: on a CPU the cost of the operation, on a GPU almost nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

HOST = "host"  # copies between a rank's device and its host's memory, counted like an axis
DISK = "disk"  # copies between the memory of a rank and its disks
_KEPT = ("staging", "host_bounce")  # buffers of transports


@dataclass
class Sent:
    """Totals of one purpose on one axis."""

    ops: int = 0
    elements: int = 0
    bytes_sent: int = 0


@dataclass
class Held:
    """Bytes of one category, and their peak."""

    now: int = 0
    peak: int = 0


class Timed:
    """A context that adds its wall time to `seconds[kind]`; a fast class, because each layer enters several."""

    __slots__ = ("_began", "_kind", "_seconds")

    def __init__(self, seconds: dict[str, float], kind: str):
        self._seconds, self._kind = seconds, kind

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + (time.perf_counter() - self._began)


class Ledger:
    """Totals since the start: `traffic[axis][purpose]`, `bytes[category]`, `seconds[unit][kind]`."""

    def __init__(self) -> None:
        self.traffic: dict[str, dict[str, Sent]] = {}
        self.bytes: dict[str, Held] = {}
        self.seconds: dict[str, dict[str, float]] = {}

    def hold(self, category: str, size: int) -> None:
        """Count `size` more bytes as held; fewer when it is negative."""
        held = self.bytes.setdefault(category, Held())
        held.now += size
        held.peak = max(held.peak, held.now)

    def held(self) -> dict[str, int]:
        """Return the bytes that are held by category."""
        return {category: held.now for category, held in self.bytes.items()}

    def let_go(self, kept: Mapping[str, int]) -> None:
        """Count as freed all memory held since `kept`, except transport buffers, which are reused; peaks stay.

        Args:
            kept: an earlier result of `held`.
        """
        for category, held in self.bytes.items():
            if category not in _KEPT:
                held.now = kept.get(category, 0)

    def time(self, unit: str, kind: str) -> "Timed":
        """Return a context that adds the seconds spent inside to `seconds[unit][kind]`."""
        return Timed(self.seconds.setdefault(unit, {}), kind)

    def add(self, axis: str, purpose: str, elements: int, item_size: int) -> None:
        """Count one operation that sent `elements` elements of `item_size` bytes."""
        sent = self.traffic.setdefault(axis, {}).setdefault(purpose, Sent())
        sent.ops += 1
        sent.elements += elements
        sent.bytes_sent += elements * item_size

    def repeat(self, traffic: Mapping[str, Mapping[str, Sent]], times: int) -> None:
        """Count the given traffic `times` more times."""
        for axis, purposes in traffic.items():
            for purpose, more in purposes.items():
                sent = self.traffic.setdefault(axis, {}).setdefault(purpose, Sent())
                sent.ops += times * more.ops
                sent.elements += times * more.elements
                sent.bytes_sent += times * more.bytes_sent

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent to other ranks, over all axes and purposes."""
        axes = (purposes for axis, purposes in self.traffic.items() if axis not in (HOST, DISK))
        return sum(sent.bytes_sent for purposes in axes for sent in purposes.values())

    def traffic_as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return `traffic` as dictionaries: [axis][purpose][field of `Sent`]."""
        return {a: {p: asdict(sent) for p, sent in purposes.items()} for a, purposes in self.traffic.items()}

    def bytes_as_dict(self) -> dict[str, dict[str, int]]:
        """Return `bytes` as dictionaries: [category][field of `Held`]."""
        return {category: asdict(held) for category, held in self.bytes.items()}
