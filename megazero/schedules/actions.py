"""Define pipeline schedules: a list of actions for each rank.

An action is one operation of one rank on one micro-batch in one stage. It prints as stage, kind, micro-batch:

    2F5            forward of micro-batch 5 in stage 2
    2B5            its backward: gradients of the stage's input and weights
    2I5  2W5       its backward in two parts, for input and weights; other actions may run in between
                   (Qi et al. 2023, arXiv 2401.10241, section 2)
    2SEND_F5       stage 2 sends its output to stage 3              3RECV_F5   stage 3 posts the receive
    2SEND_B5       stage 2 sends its input's gradient to stage 1    1RECV_B5   stage 1 posts the receive
    2REDUCE7       the stage's gradients, up to micro-batch 7, are reduced to the owners of the optimizer state
    0TIE7          the gradient of a weight shared by the first and the last stage is summed over both

A stage processes micro-batches in order, so messages between two stages are in this order too.
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

    __hash__ = object.__hash__  # members are unique; Enum's own hash is slow for the million lookups of a check


# The kinds that compute; the others communicate.
COMPUTE = F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
# The receive before, or the send after, a computation; and the offset of the other side's stage.
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
        micro_batches: number of micro-batches in the step, m.
        rank_of: for each stage, the rank that computes it.
        ranks: for each rank, its actions.
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
        """Return True if stage `other` exists and is on another rank than `stage`."""
        return 0 <= other < self.num_stages and self.rank_of[other] != self.rank_of[stage]

    def first(self, micro_batches: int) -> "Schedule":
        """Return the schedule with only the first `micro_batches` micro-batches, in unchanged order."""
        return replace(self.only(lambda action: action.micro_batch < micro_batches), micro_batches=micro_batches)

    def forward_only(self) -> "Schedule":
        """Return the schedule of validation, without backward; no forward action depends on a backward one."""
        return self.only(lambda action: action.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD))

    def only(self, wanted: Callable[[Action], bool]) -> "Schedule":
        """Return the schedule with only the wanted actions."""
        return replace(self, ranks=tuple(tuple(filter(wanted, actions)) for actions in self.ranks))

    def __str__(self) -> str:
        """Return one line for each rank."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


def passes(stage: int, kind: Kind, micro_batches: Iterable[int]) -> Iterator[Action]:
    """Return the actions of one kind in a stage, in order."""
    return (Action(stage, kind, m) for m in micro_batches)


def before_forward(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return (stage, micro-batch) of a rank's backwards whose next pass is a forward of the same stage.

    Weight gradients in between do not count as a pass.
    """
    passes = [a for a in actions if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)]
    pairs = ((a, b) for a, b in pairwise(passes) if a.kind is not Kind.FORWARD and b.kind is Kind.FORWARD)
    return frozenset((a.stage, a.micro_batch) for a, b in pairs if a.stage == b.stage)
