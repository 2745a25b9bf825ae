"""No access to memory is without an order on a GPU, on any layout; and a wait that is taken away is found."""

from dataclasses import replace

import pytest

from megazero.model.transformer import Shape
from megazero.plan.job import Job
from megazero.zero.placement import Precision
from tests.checkers.plants import BF16, LAYOUTS, PLANTS, SUMS_IN_BF16, keep_three, plant_slot, store_of
from tests.checkers.races import Races
from tests.checkers.trace import FP32, pretended, record
from tests.layouts import SHAPES

DEEP = replace(SHAPES["deep"], dropout=0.0)  # without the many operations of its masks


def races_of(job: Job, rank: int = 0, precision: Precision = FP32, shape: Shape = DEEP) -> list[str]:
    races = Races(rank)
    record(job, rank, shape, precision, trace=races)
    assert len(races.events) > 1000, "operations are seen"
    return races.found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_access_has_an_order(name: str) -> None:
    assert races_of(LAYOUTS[name]) == []


def test_sums_in_another_dtype_have_an_order() -> None:
    for name in ("stage 2", "hybrid"):
        assert races_of(LAYOUTS[name], precision=SUMS_IN_BF16) == []


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_access_of_every_rank_has_an_order(name: str) -> None:
    for rank in range(LAYOUTS[name].ranks):
        for precision in (FP32, BF16, SUMS_IN_BF16):
            assert races_of(LAYOUTS[name], rank, precision, SHAPES["deep"]) == []


@pytest.mark.parametrize("name", PLANTS)
def test_a_wait_that_is_taken_away_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant = PLANTS[name]
    plant.take_away(monkeypatch)
    found = races_of(LAYOUTS[plant.layout])
    assert any(plant.race in line for line in found), found


def races_of_a_store() -> list[str]:
    races = Races(0)
    with pretended(races, 2) as comm:
        store = store_of(comm)
        with races.watching(lambda _: False):
            keep_three(store)
    return races.found


def test_a_kept_input_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert races_of_a_store() == []
    plant_slot(monkeypatch)
    assert races_of_a_store() == ["aten::copy_ on compute is not behind aten::copy_ on side 1"]
