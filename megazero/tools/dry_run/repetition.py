"""Simulate a few times what a rank does many times in a step, and count it as often as the step has it."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

from megazero.comm.ledger import Ledger, Sent
from megazero.schedules.actions import Action
from megazero.schedules.repeat import Block, Shortened
from megazero.tools.dry_run.timeline import MemoryTimeline

Traffic = dict[str, dict[str, Sent]]


@dataclass(frozen=True)
class Operation:
    """A transfer to other ranks or to the host.

    Attributes:
        action, part: those of the step in which it was sent.
    """

    action: str
    part: str
    axis: str
    purpose: str
    bytes_sent: int


class RecordingLedger(Ledger):
    """A ledger that also records each operation, and memory into a timeline."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline: MemoryTimeline | None = None
        self.operations: list[Operation] = []

    def hold(self, category: str, size: int) -> None:
        super().hold(category, size)
        if self.timeline is not None:
            self.timeline.hold(category, size)

    def add(self, axis: str, purpose: str, elements: int, item_size: int) -> None:
        super().add(axis, purpose, elements, item_size)
        if self.timeline is not None:
            place = self.timeline.place
            self.operations.append(Operation(place.action, place.part, axis, purpose, elements * item_size))


@dataclass(frozen=True)
class RepeatedBlock:
    """A part of a step that was simulated once, and counted for all that are like it.

    Attributes:
        begins, ends: its first and its last action.
        times: how often it was left out.
    """

    begins: str
    ends: str
    times: int


@dataclass(frozen=True)
class Repeated:
    """The parts of a step that were simulated once.

    Attributes:
        micro_batches: of the step.
        simulated: those that were.
        blocks: none: all of it was.
    """

    micro_batches: int
    simulated: int
    blocks: tuple[RepeatedBlock, ...]


@dataclass(frozen=True)
class _Mark:
    """Counts at the time when an action began."""

    operations: int
    events: int
    traffic: Traffic
    held: dict[str, int]


class Repetition:
    """One step of a rank with as few micro-batches as stand for all.

    What a block of actions (`schedules/repeat.py`) sends, and leaves in memory or takes out of it, is counted as many
    times more as copies of it were left out: in the place where they would be, so that what follows is as high as it
    would be. The next copy must send and leave as much.

    Args:
        ledger: counts the bytes that the rank sends.
        timeline: counts memory.
    """

    def __init__(self, short: Shortened, ledger: RecordingLedger, timeline: MemoryTimeline):
        self._short, self._ledger, self._timeline = short, ledger, timeline
        self._copies: dict[Block, tuple[_Mark, _Mark, _Mark]] = {}  # begin and end, and the next one's begin

    def actions(self) -> Iterator[tuple[Action, Action]]:
        """Yield the actions to run, in order, each with the action of the whole step that it stands for."""
        begins: dict[Block, _Mark] = {}
        for number, pair in enumerate(zip(self._short.actions, self._short.originals, strict=True)):
            for block in self._short.blocks:
                if number == block.first:
                    begins[block] = self._mark()
                elif number == block.last:
                    end = self._mark()
                    self._count(begins[block], end, block.times)
                    self._copies[block] = begins[block], end, self._mark()
                elif number == 2 * block.last - block.first:
                    self._compare(*self._copies[block], self._mark())
            yield pair

    def _mark(self) -> _Mark:
        held = {category: held.now for category, held in self._ledger.bytes.items()}
        return _Mark(len(self._ledger.operations), self._timeline.events, deepcopy(self._ledger.traffic), held)

    def _count(self, begin: _Mark, end: _Mark, times: int) -> None:
        self._ledger.repeat(sent_since(begin.traffic, end.traffic), times)
        self._timeline.repeat(begin.events, end.events, times)

    def _compare(self, begin: _Mark, end: _Mark, next_begin: _Mark, next_end: _Mark) -> None:
        sent, change = self._ledger.operations, self._timeline.change
        one, other = sent[begin.operations : end.operations], sent[end.operations : next_end.operations]
        assert _sent(one) == _sent(other), "equal actions send the same"
        left = change(begin.events, end.events), change(next_begin.events, next_end.events)
        assert left[0] == left[1], "equal actions leave the same in memory"
        assert begin.held == end.held == next_end.held, "what lasts is made before anything repeats"


def repeated(short: Shortened, describe: Callable[[Action], str | None]) -> Repeated:
    """Return what a shorter step leaves out, its actions described."""
    blocks = []
    for block in short.blocks:
        words = [text for action in short.originals[block.first : block.last] if (text := describe(action)) is not None]
        blocks.append(RepeatedBlock(words[0], words[-1], block.times))
    newest = max(action.micro_batch for action in short.originals)
    return Repeated(newest + 1, short.micro_batches, tuple(blocks))


def _sent(operations: list[Operation]) -> list[tuple[str, str, int]]:
    return [(operation.axis, operation.purpose, operation.bytes_sent) for operation in operations]


def sent_since(before: Traffic, now: Traffic) -> Traffic:
    """Return what was sent between two states of a ledger."""
    nothing = Sent()
    difference: Traffic = {}
    for axis, purposes in now.items():
        for purpose, sent in purposes.items():
            old = before.get(axis, {}).get(purpose, nothing)
            if sent.ops > old.ops:
                more = Sent(sent.ops - old.ops, sent.elements - old.elements, sent.bytes_sent - old.bytes_sent)
                difference.setdefault(axis, {})[purpose] = more
    return difference
