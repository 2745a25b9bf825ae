"""What the modules share that one process has sharded: they may be in one graph, and in one backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class Passed(Protocol):
    """A module that a backward has come through."""

    def leave(self) -> None:
        """Free what the backward has needed."""
        ...


@dataclass
class Process:
    """The sharded modules of a process, or of a thread that is a rank.

    Attributes:
        modules: their number so far.
        order: a number made of the units that ranks in lockstep have gathered, in their order.
        in_backward: a backward of some of them runs.
        passed: others, which it has come through: their gradients are dropped.
    """

    modules: int = 0
    order: int = 0
    in_backward: bool = False
    passed: list[Passed] = field(default_factory=list)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Be around a backward."""
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            for one in self.passed:
                one.leave()
            self.passed.clear()
