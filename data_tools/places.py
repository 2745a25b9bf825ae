"""Say where in a corpus something is: a place behind a record, a part of the whole."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A place in a corpus, behind a record, and what was left out up to there.

    Attributes:
        file: the number of the file, from 0.
        record: how many records of the file (lines, rows, or the file itself) lie before the place.
        rejected, filtered, duplicates: records or files that were bad, did not pass, had been there before.
    """

    file: int = 0
    record: int = 0
    rejected: int = 0
    filtered: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class Span:
    """The bytes [start, stop) of a file, and whether the file as a whole, its first byte, is among them."""

    start: int
    stop: int
    begins: bool


@dataclass(frozen=True)
class Part:
    """A part of a corpus: share `number` of `of`, from 1. The parts in order, end to end, are the whole.

    A line of a `.jsonl`, and any other file, belongs to the part in which its first byte lies.
    """

    number: int = 1
    of: int = 1

    def spans(self, sizes: Sequence[int]) -> list["Span"]:
        """Return what is of this part in each file of these sizes."""
        total, at, found = sum(sizes), 0, []
        begin, end = (total * share // self.of for share in (self.number - 1, self.number))
        for size in sizes:
            # A file without a byte begins in no part where it is at the end of all.
            begins = begin <= at < end or (at == total and self.number == self.of)
            found.append(Span(min(max(begin - at, 0), size), min(max(end - at, 0), size), begins))
            at += size
        return found
