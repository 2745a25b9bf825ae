"""A schedule that would not end, or not compute the gradient, is refused with its lists and the culprit in them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megazero.schedules.actions import Action, Schedule
from megazero.schedules.catalogue import make
from megazero.schedules.check import ScheduleError
from megazero.schedules.layers import add_reductions, add_transfers
from megazero.schedules.simulate import Costs, simulate
from tests.schedules.parsed import parsed

Edit = Callable[[list[list[Action]]], object]


def edited(schedule: Schedule, edit: Edit) -> Schedule:
    ranks = [list(actions) for actions in schedule.ranks]
    edit(ranks)
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def remove(rank: int, text: str) -> Edit:
    return lambda ranks: ranks[rank].remove(parsed(text))


def swap(rank: int, one: str, other: str) -> Edit:
    def edit(ranks: list[list[Action]]) -> None:
        i, k = (ranks[rank].index(parsed(text)) for text in (one, other))
        ranks[rank][i], ranks[rank][k] = ranks[rank][k], ranks[rank][i]

    return edit


def add(rank: int, text: str) -> Edit:
    return lambda ranks: ranks[rank].append(parsed(text))


BROKEN: list[tuple[str, Edit, str]] = [
    ("1f1b", swap(0, "0F0", "0B0"), r"at 0F1 of rank 0: expected micro-batch 0"),
    ("1f1b", swap(1, "1F1", "1F2"), r"at 1F2 of rank 1: expected micro-batch 1"),
    ("1f1b", remove(1, "1B2"), r"at the end of rank 1: stage 1 has 4 F, 2 B|at 1B3 of rank 1: expected micro-batch 2"),
    ("1f1b", add(0, "0F3"), r"at 0F3 of rank 0: expected micro-batch 4"),
    ("1f1b", add(0, "1F4"), r"at 1F4 of rank 0: stage 1 is not on rank 0"),
    ("1f1b", add(0, "7F4"), r"at 7F4 of rank 0: stage 7 is not on rank 0"),
    ("zb-h1", swap(0, "0I1", "0W1"), r"rank 0 waits in 0W1 for 0I1 of rank 0"),
    ("zb-h1", remove(0, "0W3"), r"at the end of rank 0: stage 0 has 4 F, 0 B, 4 I and 3 W"),
]
LOWERED: list[tuple[str, Edit, str]] = [
    ("1f1b", swap(0, "0F1", "0SEND_F1"), r"rank 0 waits in 0SEND_F1 for 0F1 of rank 0"),
    ("1f1b", remove(1, "1RECV_F0"), r"rank 1: expected micro-batch 0"),
    ("1f1b", remove(1, "1RECV_F3"), r"rank 1 waits in 1F3 for 1RECV_F3 of rank 1"),
    ("1f1b", remove(0, "0SEND_F3"), r"rank 1 waits in 1F3 for 0SEND_F3 of rank 0"),
    ("1f1b", swap(0, "0B3", "0REDUCE3"), r"rank 0 waits in 0REDUCE3 for 0B3 or 0W3 of rank 0"),
    ("1f1b", swap(0, "0REDUCE3", "0TIE3"), r"rank 0 waits in 0TIE3 for 0REDUCE3 of rank 0"),
]


@pytest.mark.parametrize(("name", "edit", "reason"), BROKEN)
def test_broken_orders_are_refused(name: str, edit: Edit, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason) as caught:
        simulate(edited(make(name, 2, 4, 1), edit))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and " of rank " in lines[0], "the culprit is named"


@pytest.mark.parametrize(("name", "edit", "reason"), LOWERED)
def test_broken_transfers_are_refused(name: str, edit: Edit, reason: str) -> None:
    schedule = add_reductions(add_transfers(make(name, 2, 4, 1)), each=False, tied=True)
    simulate(schedule)
    with pytest.raises(ScheduleError, match=reason):
        simulate(edited(schedule, edit))


def test_a_circle_is_found_and_shown() -> None:
    """Each rank's list is in order by itself; together they wait for each other."""

    def last_first(ranks: list[list[Action]]) -> None:
        ranks[1].insert(0, ranks[1].pop(ranks[1].index(parsed("3F0"))))

    with pytest.raises(ScheduleError) as caught:
        simulate(edited(make("interleaved", 2, 2, 2), last_first))
    assert str(caught.value).splitlines() == [
        "interleaved never ends: rank 0 waits in 2F0 for 1F0 of rank 1; rank 1 waits in 3F0 for 2F0 of rank 0",
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "3F0 1F0 1F1 3B0 3F1 3B1 1B0 1B1",
    ]


def test_transfers_take_their_time() -> None:
    costs = [Costs(2, 2, 2)] * 2
    alone, far = (simulate(make("1f1b", 2, 1, 1), costs, transfer=t) for t in (0, 5))
    assert far.makespan == alone.makespan + 2 * 5
    inside = simulate(make("zb-v", 1, 1, 2), costs, transfer=5)
    assert inside.makespan == 12, "nothing is sent between stages of one rank"


def test_gradients_are_reduced_once_and_ties_summed_between_ranks() -> None:
    once = add_reductions(add_transfers(make("zb-h1", 2, 2, 1)), each=False, tied=False)
    assert [str(a) for rank in once.ranks for a in rank if "REDUCE" in str(a)] == ["0REDUCE1", "1REDUCE1"]
    folded = add_reductions(add_transfers(make("zb-v", 2, 2, 2)), each=False, tied=True)
    assert "TIE" not in str(folded), "both ends are on one rank"
