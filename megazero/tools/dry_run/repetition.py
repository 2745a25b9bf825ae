"""Simulate once what a rank does many times in a step, and count it as often as the step has it."""

from copy import deepcopy
from dataclasses import dataclass

from megazero.comm.ledger import Sent
from megazero.pipeline.executor import Pipeline
from megazero.schedules.repeat import Shortened, shortened
from megazero.tools.dry_run.told import Operation, ToldLedger

Traffic = dict[str, dict[str, Sent]]


@dataclass(frozen=True)
class Repeated:
    """A part of a step that was simulated once, and counted for all that are like it.

    Attributes:
        begins, ends: its first and its last action.
        times: how often it was left out.
        micro_batches: of the step.
        simulated: those that were.
    """

    begins: str
    ends: str
    times: int
    micro_batches: int
    simulated: int


class Repetition:
    """One step of a rank with as few micro-batches as stand for all.

    Args:
        micro_batches: of the step.
        ranks: of the pipeline.

    Attributes:
        simulated: micro-batches to simulate.
    """

    def __init__(self, pipeline: Pipeline, micro_batches: int, ranks: int, ledger: ToldLedger):
        self._pipeline, self._micro_batches, self._ledger = pipeline, micro_batches, ledger
        whole = Shortened(micro_batches, 0, 0, 0)
        self._short = shortened(pipeline.actions, micro_batches, ranks) or whole
        self.simulated = self._short.micro_batches
        self._done = 0
        self._marks: list[tuple[int, Traffic]] = []  # before the block, at its beginning, at its end

    def at(self) -> None:
        """Note where the step is; called before each action."""
        first, last = self._short.first, self._short.last
        if self._short.times and self._done in (2 * first - last, first, last):
            self._marks.append((len(self._ledger.operations), deepcopy(self._ledger.traffic)))
        self._done += 1

    def count(self) -> Repeated | None:
        """Count what was left out, at the end of the step; return what it was."""
        if not self._short.times:
            return None
        (earlier, _), (first, before), (last, after) = self._marks
        operations = self._ledger.operations
        assert _sent(operations[earlier:first]) == _sent(operations[first:last]), "equal actions send the same"
        self._ledger.repeat(sent_since(before, after), self._short.times)
        actions = self._pipeline.actions(self.simulated)[self._short.first : self._short.last]
        begins, ends = (self._pipeline.describe(action) or str(action) for action in (actions[0], actions[-1]))
        return Repeated(begins, ends, self._short.times, self._micro_batches, self.simulated)


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
