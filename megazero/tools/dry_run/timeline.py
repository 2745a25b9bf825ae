"""Record a step's memory over time: every allocation with its operation and place in the step, and the peak.

`Allocations` counts bytes; this also records each allocation. Memory that the ledger counts during the step (a growing
pool, an arena) belongs to its category there and not to activations. Other memory is called

    kept       if it outlives the action (the forward or backward of a micro-batch) in which it was allocated
    working    if it does not

This is known only afterwards.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from megazero.comm.ledger import Ledger
from megazero.observe.allocations import Allocations

KEPT, WORKING = "activations kept", "activations working"


class AllocationSite(NamedTuple):
    """A place in a step: the action under way, and the module of the model ("" for none)."""

    action: str
    module: str

    @property
    def part(self) -> str:
        """Return the part of the model that the module belongs to: a block, the embedding, the head."""
        found = re.match(r"blocks\.\d+|\w+", self.module)
        return found[0] if found else ""


_NOWHERE = AllocationSite("", "")


class Allocation(NamedTuple):
    """An allocation of a step.

    Attributes:
        category: category in the ledger, "" for memory that a step allocates and frees.
        size: bytes.
        operation: the operation that returned it.
        place: the place of that operation.
    """

    category: str
    size: int
    operation: str
    place: AllocationSite


@dataclass(frozen=True)
class MemoryMoment:
    """The memory at one time: bytes by category, and their total."""

    place: AllocationSite
    operation: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all categories."""
        return sum(self.bytes.values())


class MemoryTimeline(Allocations):
    """A record of allocations while it is active.

    Args:
        held: bytes by category when it begins.
    """

    def __init__(self, held: Mapping[str, int]):
        super().__init__()
        self.allocations: list[Allocation] = []
        self._held = {category: size for category, size in held.items() if size}
        # The allocation's number from 1, negative when it is freed; place; operation.
        self._events: list[tuple[int, AllocationSite, str]] = []
        self._place, self._operation = _NOWHERE, ""
        self._counted: list[int] = []  # sizes that the ledger counts, whose allocation is still to come

    def at(self, action: str | None = None, module: str = "") -> None:
        """Record the following operations under an action and a module; None: the action stays the same."""
        self._place = AllocationSite(self._place.action if action is None else action, module)

    def hold(self, category: str, size: int) -> None:
        """Record `size` bytes that the ledger counts; the next allocation of that size is not recorded again."""
        self._counted.append(size)
        self._add(category, size, "")

    def came(self, size: int) -> int:
        """Record an allocation of `size` bytes; return its number, or 0 if `hold` has announced it or it is empty."""
        super().came(size)
        if size in self._counted:
            self._counted.remove(size)
            return 0
        return self._add("", size, self._operation) if size else 0

    def went(self, size: int, number: int) -> None:
        """Record that an allocation of `size` bytes was freed; `number` is the result of `came` for it."""
        super().went(size, number)
        if number:
            self._events.append((-number, self._place, self._operation))

    def stretches(self) -> Iterator[tuple[MemoryMoment, int]]:
        """Yield (peak, bytes held at the end) of each part of the model in each action, in order."""
        for _, moments in groupby(self._moments(), lambda moment: (moment.place.action, moment.place.part)):
            own = list(moments)
            yield max(own, key=lambda moment: moment.total), own[-1].total

    def peak_live(self) -> tuple[MemoryMoment, list[Allocation]]:
        """Return the peak, and the allocations that are live then and that the ledger does not count."""
        moments = (MemoryMoment(_NOWHERE, "", self._held), *self._moments())
        when, highest = max(enumerate(moments), key=lambda pair: pair[1].total)
        there = (self.allocations[number - 1] for number in _left(self._events[:when]))
        return highest, [allocation for allocation in there if not allocation.category]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # autograd calls it all the time for tensors without data
            return func(*args, **(kwargs or {}))
        self._operation = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _add(self, category: str, size: int, operation: str) -> int:
        self.allocations.append(Allocation(category, size, operation, self._place))
        self._events.append((len(self.allocations), self._place, operation))
        return len(self.allocations)

    def _moments(self) -> Iterator[MemoryMoment]:
        """Yield the memory after every event."""
        categories = self._categories()
        now = dict(self._held)
        for number, place, operation in self._events:
            allocation, category = self.allocations[abs(number) - 1], categories[abs(number) - 1]
            now[category] = now.get(category, 0) + (allocation.size if number > 0 else -allocation.size)
            yield MemoryMoment(place, operation, dict(now))

    def _categories(self) -> list[str]:
        ends = {-number: place.action for number, place, _ in self._events if number < 0}
        return [
            allocation.category or (WORKING if ends.get(number) == allocation.place.action else KEPT)
            for number, allocation in enumerate(self.allocations, 1)
        ]


class RecordingLedger(Ledger):
    """A ledger that also records memory into a timeline."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline: MemoryTimeline | None = None

    def hold(self, category: str, size: int) -> None:
        """Count bytes of a category, on the timeline too."""
        super().hold(category, size)
        if self.timeline is not None:
            self.timeline.hold(category, size)


def _left(events: Sequence[tuple[int, AllocationSite, str]]) -> dict[int, None]:
    """Return, in order, the numbers of the allocations that no later event frees."""
    left: dict[int, None] = {}
    for number, _, _ in events:
        left[number] = None
        if -number in left:
            del left[number], left[-number]
    return left


def by_origin(live: list[Allocation]) -> list[tuple[int, int, str, str]]:
    """Return (bytes, count, module or action without numbers, operation) of the allocations, the largest first."""
    origins: dict[tuple[str, str], list[int]] = {}
    for allocation in live:
        place = allocation.place.module or allocation.place.action
        origins.setdefault((re.sub(r"\d+", "*", place), allocation.operation), []).append(allocation.size)
    return sorted(((sum(sizes), len(sizes), *origin) for origin, sizes in origins.items()), key=lambda row: -row[0])
