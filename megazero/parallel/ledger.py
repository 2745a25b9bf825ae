"""What a rank sent: operations, elements and bytes, by axis and purpose.

Elements are what the rank sends by the ring formula, whatever algorithm ran, so that they can be compared with the
papers' figures. For N ranks and n elements of the full tensor (padded to a multiple of N):

    all-reduce                    2 n (N - 1) / N
    reduce-scatter, all-gather      n (N - 1) / N
    broadcast                       n            (by the source)
    point to point                  n

(Patarasuk and Yuan 2009; the ZeRO paper, section 7.) Bytes are elements times item size.
"""

from dataclasses import asdict, dataclass


@dataclass
class Sent:
    """Totals of one purpose on one axis."""

    ops: int = 0
    elements: int = 0
    bytes_sent: int = 0


class Ledger:
    """Totals since the start; `traffic[axis][purpose]`."""

    def __init__(self) -> None:
        self.traffic: dict[str, dict[str, Sent]] = {}

    def add(self, axis: str, purpose: str, elements: int, item_size: int) -> None:
        """One operation that sent `elements` elements of `item_size` bytes."""
        sent = self.traffic.setdefault(axis, {}).setdefault(purpose, Sent())
        sent.ops += 1
        sent.elements += elements
        sent.bytes_sent += elements * item_size

    @property
    def bytes_sent(self) -> int:
        """Bytes over all axes and purposes."""
        return sum(sent.bytes_sent for purposes in self.traffic.values() for sent in purposes.values())

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """The contract's `traffic` object."""
        return {a: {p: asdict(sent) for p, sent in purposes.items()} for a, purposes in self.traffic.items()}
