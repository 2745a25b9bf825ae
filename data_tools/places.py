"""Divide the bytes of a corpus into parts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Part `number` of `of` equal parts of a corpus, counted from 1. The parts in order, end to end, are the corpus.

    A line of a `.jsonl`, and any other file, belongs to the part that contains its first byte.
    """

    number: int = 1
    of: int = 1

    def divided(self, count: int) -> list["Part"]:
        """Split this part into `count` smaller ones, in order."""
        return [Part((self.number - 1) * count + k, self.of * count) for k in range(1, count + 1)]

    def spans(self, sizes: Sequence[int]) -> list[tuple[int, int, bool]]:
        """Return (start, stop, begins) of each file: its bytes in this part, and whether the file begins in it."""
        total, at, found = sum(sizes), 0, []
        begin, end = (total * share // self.of for share in (self.number - 1, self.number))
        for size in sizes:
            # An empty file at the end of the corpus is in no part's range; the last part has it.
            begins = begin <= at < end or (at == total and self.number == self.of)
            found.append((min(max(begin - at, 0), size), min(max(end - at, 0), size), begins))
            at += size
        return found
