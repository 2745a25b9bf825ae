"""An update writes to a rank's own parameters only when the gather that reads them has ended."""

import gc

import pytest

from megazero.comm.grid import Grid
from megazero.zero import gather
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, Wires, job_on
from tests.ranks import run_ranks


def two_updates(grid: Grid, stage: int) -> list[bool]:
    """Update twice with no forward between, which would have waited; of each update, whether a gather was under way.

    No gather is ended for want of room, as none is on NCCL.
    """
    gather.MOST_UNREAD = 100  # in this process, which is the test's own
    rank = Rank(grid, job_on(1, 2, stage=stage), SHAPES["gpt"], Precision())
    engine = rank.engine
    under_way: list[bool] = []
    honest = engine.optimizer.update

    def update(unit, **how) -> None:
        under_way.append(unit in engine.gather._coming)
        honest(unit, **how)

    engine.optimizer.update = update  # type: ignore[method-assign]
    rank.step(0)
    assert len(engine.gather._coming) == len(engine.units), "what was published is on its way"
    engine.finish_step(1e-3)
    engine.gather.finish()
    return under_way


@pytest.mark.parametrize("stage", [1, 2])
def test_the_gather_of_the_update_before_ends_first(stage: int) -> None:
    for under_way in run_ranks(2, two_updates, stage):
        assert under_way and not any(under_way)


def three_engines(grid: Grid, stage: int) -> int:
    """Train with one engine after the other on the same connections, as the parts of a run do; return their number."""
    for _ in range(3):
        rank = Rank(grid, job_on(1, 2, stage=stage), SHAPES["gpt"], Precision(), Wires(sockets=True))
        rank.step(0)
        assert rank.engine.gather._coming, "what was published is on its way"
        rank.engine.gather.finish()
        del rank
        gc.collect()
    return 3


@pytest.mark.parametrize("stage", [1, 2])
def test_an_engine_leaves_no_receive_behind(stage: int) -> None:
    """gloo delivers nothing more over a connection on which a posted receive was dropped."""
    assert run_ranks(2, three_engines, stage) == [3, 3]
