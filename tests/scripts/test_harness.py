"""The benchmark harness: systems of one process and of several ranks, and the statistics of their rounds."""

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.bench.harness import WARM_UP, Comparison, System, compare, median_interval, report, table

UNIT = 0.02  # seconds


def alone(loss: float) -> Callable[[], float]:
    """A step of two units on one process."""

    def step() -> float:
        time.sleep(2 * UNIT)
        return loss

    return step


def together(folder: Path, rank: int, size: int, store: str) -> Callable[[], float]:
    """A step of 1 + rank units on each of several ranks; none ends before all have begun."""
    (folder / f"rank-{rank}-of-{size}").write_text(store)
    count = iter(range(1 << 30))

    def step() -> float:
        number = next(count)
        (folder / f"step-{number}-{rank}").touch()
        while not all((folder / f"step-{number}-{other}").exists() for other in range(size)):
            time.sleep(1e-3)
        time.sleep((1 + rank) * UNIT)
        return number + 0.5 * rank

    return step


def broken(rank: int, size: int, store: str) -> Callable[[], float]:
    """Rank 1 fails, rank 0 waits for it."""
    if rank == 1:
        raise RuntimeError("rank 1 cannot")
    time.sleep(1000)
    return alone(0.0)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need not import torch anew, whatever else the machine does."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr("scripts.bench.harness.FOREIGN_LIMIT", 2.0)


@pytest.fixture
def comparison(forked: None, tmp_path: Path) -> Comparison:
    reference = System("one", alone, (7.0,), 1)
    return compare(reference, [System("two", together, (tmp_path,), 1, ranks=2)], rounds=3, divide_by=2)


def test_ranks_step_together_and_know_where_to_meet(comparison: Comparison, tmp_path: Path):
    stores = [(tmp_path / f"rank-{rank}-of-2").read_text() for rank in range(2)]
    assert stores[0] == stores[1] != ""
    assert not Path(stores[0]).parent.exists()
    assert (comparison.rounds, comparison.quiet_rounds) == (3, 3)
    assert comparison.losses == {"one": [7.0] * (WARM_UP + 3), "two": [n + 0.25 for n in range(WARM_UP + 3)]}


def test_a_step_takes_as_long_as_its_slowest_rank(comparison: Comparison):
    one, two = comparison.rows
    assert one.ratio == pytest.approx(2.0) and one.ci95 == pytest.approx((2.0, 2.0))
    assert two.seconds >= 2 * UNIT
    assert two.ci95[0] <= two.ratio <= two.ci95[1]
    assert two.ratio == pytest.approx(two.seconds / (one.seconds / 2), rel=0.5)
    assert two.peak_mb > 10


def test_report_and_table_have_every_row(comparison: Comparison):
    found = json.loads(json.dumps(report(comparison, floor_s=0.1)))
    assert {"machine", "versions", "floor_s", "rows"} <= set(found)
    assert [set(row) for row in found["rows"]] == [
        {"system", "ratio", "ci95", "peak_mb", "seconds", "reason", "bound"}
    ] * 2
    assert [line.split(" | ")[0] for line in table("title", comparison).splitlines()[-2:]] == ["| one", "| two"]


def test_a_rank_that_fails_ends_the_comparison(forked: None, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(EOFError):
        compare(System("broken", broken, (), 1, ranks=2), [], rounds=1)
    assert "rank 1 cannot" in capfd.readouterr().err


def test_interval_of_the_median():
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([5.0, 1.0, 2.0]) == (1.0, 5.0)
    # n = 15: the 4th and the 12th value enclose the median with 96.5 % (tail of Binomial(15, 1/2) up to 3: 1.76 %)
    assert median_interval([float(n) for n in range(1, 16)]) == (4.0, 12.0)
