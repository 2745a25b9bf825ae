"""A pipeline schedule is a list of actions for each rank.

An action is what one rank does with one micro-batch of one stage. It prints as stage, kind, micro-batch:

    2F5            forward of micro-batch 5 in stage 2
    2B5            its backward: gradients of the stage's input and of its weights
    2I5  2W5       the same in two parts, which need not follow each other (Qi et al. 2023, arXiv 2401.10241, section 2)
    2SEND_F5       its output goes to stage 3               3RECV_F5   where that comes from stage 2
    2SEND_B5       the gradient of its input, to stage 1    1RECV_B5   where that comes from stage 2
    2REDUCE7       gradients that the stage has so far go to where the optimizer state is
    0TIE7          the gradient of a weight that the first and the last stage share is summed over both

What one stage computes comes in the order of micro-batches, so what goes from one stage to another does too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise


class Kind(Enum):
    """The kinds of action."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE"
    TIE = "TIE"

    __hash__ = object.__hash__  # members are unique, and hashed a million times where a step is checked


# The kinds that compute; others send or receive.
COMPUTE = F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
# The message that a computation waits for, and that it makes; how many stages away its other end is.
RECEIVES = {F: (Kind.RECEIVE_FORWARD, -1), B: (Kind.RECEIVE_BACKWARD, 1), I: (Kind.RECEIVE_BACKWARD, 1)}
SENDS = {F: (Kind.SEND_FORWARD, 1), B: (Kind.SEND_BACKWARD, -1), I: (Kind.SEND_BACKWARD, -1)}


@dataclass(frozen=True)
class Action:
    """One action of one rank."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline in one step, in order.

    Attributes:
        name: the kind of schedule.
        micro_batches: their number in the step, m.
        rank_of: of each stage the rank that computes it.
        ranks: of each rank its actions.
    """

    name: str
    micro_batches: int
    rank_of: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage, where in enumerate(self.rank_of) if where == rank]

    def crosses(self, stage: int, other: int) -> bool:
        """Return whether what goes from a stage to another, which there may not be, goes to another rank."""
        return 0 <= other < self.num_stages and self.rank_of[other] != self.rank_of[stage]

    def first(self, micro_batches: int) -> "Schedule":
        """Return the schedule of the first `micro_batches` only, in the same order."""
        return replace(self.only(lambda action: action.micro_batch < micro_batches), micro_batches=micro_batches)

    def forward_only(self) -> "Schedule":
        """Return the schedule of validation: without the actions of backward, for which no others wait."""
        return self.only(lambda action: action.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD))

    def only(self, wanted: Callable[[Action], bool]) -> "Schedule":
        """Return the schedule with the wanted actions only."""
        return replace(self, ranks=tuple(tuple(filter(wanted, actions)) for actions in self.ranks))

    def __str__(self) -> str:
        """Return one line for each rank."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


def forwards(stage: int, micro_batches: Iterable[int]) -> Iterator[Action]:
    """Return the forwards of a stage, in order."""
    return (Action(stage, Kind.FORWARD, m) for m in micro_batches)


def backwards(stage: int, micro_batches: Iterable[int]) -> Iterator[Action]:
    """Return the backwards of a stage, in order."""
    return (Action(stage, Kind.BACKWARD, m) for m in micro_batches)


def before_forward(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return (stage, micro-batch) of a rank's backwards after which a forward of the same stage comes next.

    Weight gradients may be computed between the two.
    """
    passes = [a for a in actions if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)]
    pairs = ((a, b) for a, b in pairwise(passes) if a.kind is not Kind.FORWARD and b.kind is Kind.FORWARD)
    return frozenset((a.stage, a.micro_batch) for a, b in pairs if a.stage == b.stage)
