"""Bubbles and memory of every schedule against the papers' formulas; any number of micro-batches."""

from fractions import Fraction

import pytest

from megazero.schedules.actions import COMPUTE, Action, Kind
from megazero.schedules.catalogue import make
from megazero.schedules.layers import add_reductions, add_transfers
from megazero.schedules.simulate import Costs, Timeline, peak_live, simulate
from tests.schedules.parsed import parsed

GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 3 * p, 8 * p)]
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4), "zb-h1": (1,), "zb-v": (2,)}
ALL = [(name, v) for name, chunks in CHUNKS.items() for v in chunks]


def exact(value: float) -> Fraction:
    return Fraction(value).limit_denominator(10_000)


def run(name: str, p: int, m: int, v: int, costs: Costs) -> Timeline:
    schedule = make(name, p, m, v)
    return simulate(schedule, [costs] * schedule.num_stages)


@pytest.mark.parametrize(("p", "m"), GRID)
@pytest.mark.parametrize("costs", [Costs(1, 1, 1), Costs(2, 3, 1), Costs(4, 5, 3)], ids=str)
def test_bubbles_equal_the_formulas(p: int, m: int, costs: Costs) -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1) / m, and over v interleaved; Qi et al. 2023, table 2: ZB-H1."""
    f, b, w = costs.forward, costs.input, costs.weight
    for name in ("gpipe", "1f1b"):
        assert exact(run(name, p, m, 1, costs).bubble) == Fraction(p - 1, m), name
    for v in (2, 3, 4):
        assert exact(run("interleaved", p, m, v, costs).bubble) == Fraction(p - 1, v * m), v
    if m >= 2 * p - 1 and b >= w:
        assert exact(run("zb-h1", p, m, 1, costs).bubble) == Fraction((p - 1) * (f + b - w), m * (f + b + w))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= 2 * p])
def test_zb_v_has_no_bubble_where_its_three_parts_cost_alike(p: int, m: int) -> None:
    """Qi et al. 2024: each rank's own first to last action. With a common end the last rank's late start remains:
    p - 1 forwards of a chunk, half of ZB-H1's bubble."""
    timeline = run("zb-v", p, m, 2, Costs())
    assert timeline.bubble_without_common_end == 0
    assert exact(timeline.bubble) == Fraction(p - 1, 6 * m)
    assert timeline.bubble <= run("zb-h1", p, m, 1, Costs()).bubble


@pytest.mark.parametrize(("p", "m"), GRID)
def test_peak_live_micro_batches_equal_the_formulas(p: int, m: int) -> None:
    assert peak_live(make("gpipe", p, m, 1)) == [m] * p
    assert peak_live(make("1f1b", p, m, 1)) == [min(p - r, m) for r in range(p)]
    assert peak_live(make("zb-h1", p, m, 1)) == [min(p, m)] * p  # as much as the first rank of 1f1b
    if m >= 2 * p:
        assert peak_live(make("zb-v", p, m, 2)) == [2 * p] * p  # in half stages
        for v in (2, 3):  # L (1 + (p - 1) / (p v)) of L = p whole stages, on the first rank
            assert Fraction(peak_live(make("interleaved", p, m, v))[0], v) == p * (1 + Fraction(p - 1, p * v))


@pytest.mark.parametrize(("name", "v"), ALL)
@pytest.mark.parametrize("p", range(1, 7))
def test_any_number_of_micro_batches(name: str, v: int, p: int) -> None:
    """Each stage does each once, nothing waits for ever, lowered or not."""
    for m in range(1, 2 * p + 3):
        plain = make(name, p, m, v)
        for schedule in (
            plain,
            plain.forward_only(),
            *(add_reductions(add_transfers(plain), each=each, tied=tied) for each in (0, 1) for tied in (0, 1)),
            add_transfers(plain).forward_only(),
        ):
            timeline = simulate(schedule)
            assert sum(map(len, timeline.ranks)) == sum(a.kind in COMPUTE for rank in schedule.ranks for a in rank)
            forwards = [a for rank in schedule.ranks for a in rank if a.kind is Kind.FORWARD]
            assert len(forwards) == m * schedule.num_stages == len(set(forwards))


def test_an_action_prints_as_stage_kind_and_micro_batch() -> None:
    for kind in Kind:
        action = Action(3, kind, 17)
        assert str(action) == f"3{kind.value}17" and parsed(str(action)) == action
