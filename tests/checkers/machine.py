"""Run what the GPUs of all ranks have queued, with real values, in the worst order that its waits allow.

An `Item` is something queued: it may run when all that it has to follow has run. Which of those that may is run next is
the choice of an `Order`, a function:

    as_queued   each as soon as it may: what the run means
    late        the computation as far as the host needs it; what is beside it only when the computation waits for it,
                and of several streams first what was queued last
    early       what is beside the computation as soon as it may; the computation only when the host waits for it
    mixed(n)    any of these, by the n-th series of numbers

Ranks are threads, of which one runs at a time, so that every run of an order is the same.
"""

import threading
from collections.abc import Callable, Iterable
from enum import IntEnum

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.checkers.pretend import Name


class Kind(IntEnum):
    """What an item is."""

    BEGIN = 0  # an operation beside the computation begins: where it will write, there may be anything from now on
    COMPUTE = 1
    BESIDE = 2


class Item:
    """Something that is queued.

    Args:
        run: does it; None: it only waits.
        follows: what it has to follow; None or done: nothing.
        expected: how many others it will have to follow that are not queued yet.

    Attributes:
        missing: how many of these are not done.
        needed: the host waits for it, or for what follows it.
        closed: nothing more may be added to it.
        number: in the order in which items were queued.
    """

    def __init__(
        self,
        kind: Kind,
        run: Callable[[], object] | None,
        follows: Iterable["Item | None"] = (),
        expected: int = 0,
    ):
        self.kind = kind
        self.runs = [] if run is None else [run]
        self.missing, self.number = expected, 0
        self.done = self.needed = self.closed = False
        self._before: list[Item] = []
        self._after: list[Item] = []
        for item in follows:
            if item is not None and not item.done:
                self.missing += 1
                self.follow(item)

    def follow(self, item: "Item") -> None:
        item.closed = True
        item._after.append(self)
        self._before.append(item)
        if self.needed:
            item.need()

    def need(self) -> None:
        """Mark the item and all that it has to follow as needed."""
        todo = [self]
        while todo:
            item = todo.pop()
            if not (item.needed or item.done):
                item.needed = True
                todo += item._before

    def do(self) -> list["Item"]:
        """Run the item; return those that may run now."""
        with torch.no_grad(), _disable_current_modes():
            for run in self.runs:
                run()
        self.done, after = True, self._after
        self.runs, self._before, self._after = [], [], []
        for item in after:
            item.missing -= 1
        return [item for item in after if not item.missing]


Order = Callable[[Item], tuple[int, int] | None]  # of those that may run, the smallest is next; None: not now


def as_queued(item: Item) -> tuple[int, int] | None:
    return 0, item.number


def late(item: Item) -> tuple[int, int] | None:
    number = -item.number if item.kind is Kind.BESIDE else item.number
    return (item.kind, number) if item.needed or item.kind is Kind.BEGIN else None


def early(item: Item) -> tuple[int, int] | None:
    if item.kind is Kind.COMPUTE:
        return (1, item.number) if item.needed else None
    return 0, item.number


def mixed(series: int) -> Order:
    """Return an order by chance: of what nobody needs yet, one in 16 may run."""
    state = 2 * series + 1

    def order(item: Item) -> tuple[int, int] | None:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's generator for MMIX
        chance = state >> 33
        return (chance, item.number) if item.needed or chance % 16 == 0 else None

    return order


class Meeting:
    """An operation of several ranks: all begin, then the memory of all is read, then each rank's is written.

    Attributes:
        read: reads the memory of all.
        results: of each rank, flat; None of one that receives nothing.
    """

    def __init__(self, size: int):
        self.sources: list[Tensor | None] = [None] * size
        self.kinds: set[str] = set()
        self.results: list[Tensor | None] = []
        self.read = Item(Kind.BESIDE, self._read, expected=size)

    def _read(self) -> None:
        there = [x.clone().view(-1) for x in self.sources if x is not None]
        size = len(self.sources)
        if not there:  # of a list of parts, which nobody uses
            self.results = [None] * size
        elif self.kinds == {"send", "receive"}:
            self.results = there * size
        elif self.kinds == {"all_gather"}:
            self.results = [torch.cat(there)] * size
        elif self.kinds == {"all_to_all"}:
            self.results = [torch.cat([x.chunk(size)[k] for x in there]) for k in range(size)]
        else:
            assert len(self.kinds) == 1, f"one operation, not {self.kinds}"
            total = there[0]
            for x in there[1:]:  # in rank order, as on CPU ranks
                total = total + x
            self.results = [total] * size if self.kinds == {"all_reduce"} else [*total.chunk(size)]
        self.sources = []


class Machine:
    """The GPUs of all ranks."""

    def __init__(self, world: int, order: Order):
        self.turns = Turns(world)
        self._order, self._queued = order, 0
        self._ready: list[Item] = []
        self._meetings: dict[tuple[Name, int], Meeting] = {}

    def meeting(self, name: Name, number: int, kind: str) -> Meeting:
        """Return the operation of a communicator that has this number, of which this rank tells the kind."""
        if (name, number) not in self._meetings:
            meeting = self._meetings[name, number] = Meeting(len(name[0]))
            self.add(meeting.read)
        meeting = self._meetings[name, number]
        meeting.kinds.add(kind)
        return meeting

    def add(self, item: Item) -> None:
        """Queue an item."""
        self._queued += 1
        item.number = self._queued
        if not item.missing:
            self._ready.append(item)
        self.turns.moved()
        self._run(None)

    def join(self, meeting: Meeting, begin: Item) -> None:
        """Let a rank take part in an operation from where it begins."""
        if not begin.done:
            meeting.read.follow(begin)
            return
        meeting.read.missing -= 1
        if not meeting.read.missing:
            self._ready.append(meeting.read)
            self._run(None)

    def force(self, item: Item | None) -> None:
        """Let the host wait until an item is done.

        Raises:
            AssertionError: it never is, because every rank waits for another.
        """
        if item is None:
            return
        item.need()
        self._run(item)
        while not item.done:
            self.turns.pass_on()
            self._run(item)

    def _run(self, until: Item | None) -> None:
        """Run items in the order, until one is done, or none may be run now."""
        while until is None or not until.done:
            keys = ((self._order(item), item) for item in self._ready)
            _, item = min(((key, item) for key, item in keys if key is not None), default=(None, None))
            if item is None:
                return
            self._ready.remove(item)
            self._ready += item.do()


class Turns:
    """Lets one of several threads run at a time."""

    def __init__(self, ranks: int):
        self._left, self._turn, self._waits, self._failed = list(range(ranks)), 0, 0, False
        self._changed = threading.Condition()

    def begin(self, rank: int) -> None:
        """Wait for the first turn of a rank."""
        self._wait(rank)

    def moved(self) -> None:
        """Note that the rank whose turn it is has come further."""
        self._waits = 0

    def pass_on(self) -> None:
        """Let the others run, because this rank has to wait for them; return when it is its turn again."""
        with self._changed:
            self._waits += 1
            assert self._waits <= len(self._left), "every rank waits for another"
            rank = self._turn
            self._next()
        self._wait(rank)

    def end(self, rank: int, *, failed: bool) -> None:
        """End the thread of a rank."""
        with self._changed:
            self._failed |= failed
            if not self._failed:
                self._waits = 0
                self._next()
                self._left.remove(rank)
            self._changed.notify_all()

    def _wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._turn == rank)
            assert not self._failed, "another rank has failed"

    def _next(self) -> None:
        place = self._left.index(self._turn)
        self._turn = self._left[(place + 1) % len(self._left)]
        self._changed.notify_all()
