"""Say which bytes of a corpus a part of it is."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of a corpus: share `number` of `of`, from 1. The parts in order, end to end, are the whole.

    A line of a `.jsonl`, and any other file, belongs to the part that has its first byte.
    """

    number: int = 1
    of: int = 1

    def divided(self, count: int) -> list["Part"]:
        """Return so many smaller parts, end to end."""
        return [Part((self.number - 1) * count + k, self.of * count) for k in range(1, count + 1)]

    def spans(self, sizes: Sequence[int]) -> list[tuple[int, int, bool]]:
        """Return of each file of these sizes which bytes [start, stop) are of this part, and whether its first is."""
        total, at, found = sum(sizes), 0, []
        begin, end = (total * share // self.of for share in (self.number - 1, self.number))
        for size in sizes:
            # A file without a byte begins in no part where it is at the end of all.
            begins = begin <= at < end or (at == total and self.number == self.of)
            found.append((min(max(begin - at, 0), size), min(max(end - at, 0), size), begins))
            at += size
        return found
