"""Record what a simulated rank sends, operation by operation, with its place in the step."""

from dataclasses import dataclass

from megazero.comm.ledger import Ledger
from megazero.tools.dry_run.timeline import MemoryTimeline


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
        """Count bytes of a category, on the timeline too."""
        super().hold(category, size)
        if self.timeline is not None:
            self.timeline.hold(category, size)

    def add(self, axis: str, purpose: str, elements: int, item_size: int) -> None:
        """Count an operation, and record the place that sent it."""
        super().add(axis, purpose, elements, item_size)
        if self.timeline is not None:
            place = self.timeline.place
            self.operations.append(Operation(place.action, place.part, axis, purpose, elements * item_size))
