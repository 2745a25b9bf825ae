"""The benchmark harness: systems of one process and of several ranks, launches, ratios, reports."""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.bench import figures, harness
from scripts.bench.harness import WARM_UP, Group, Measured, Pair, loss_difference, measure, rows_of, run
from scripts.bench.processes import Memory, System
from scripts.bench.times import interval, ratio, seconds, spread

UNIT = 0.02  # seconds


def alone(loss: float) -> Callable[[], float]:
    """A step of two units on one process."""

    def step() -> float:
        time.sleep(2 * UNIT)
        return loss

    return step


def several() -> dict[str, Callable[[], float]]:
    """Two calls of one process, which say themselves what they took."""
    return {"short": lambda: 1.0, "long": lambda: 4.0}


def together(folder: Path, rank: int, size: int, store: str) -> Callable[[], float]:
    """A step of 1 + rank units on each of several ranks; none ends before all have begun."""
    launch = len(list(folder.glob(f"rank-{rank}-*")))
    (folder / f"rank-{rank}-{launch}").write_text(store)
    count = iter(range(1 << 30))

    def step() -> float:
        number = next(count)
        (folder / f"step-{launch}-{number}-{rank}").touch()
        while not all((folder / f"step-{launch}-{number}-{other}").exists() for other in range(size)):
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


def test_ranks_step_together_and_every_launch_starts_anew(forked: None, tmp_path: Path):
    systems = [System("one", alone, (7.0,)), System("two", together, (tmp_path,), ranks=2)]
    found = measure(systems, launches=2, rounds=3)
    stores = [(tmp_path / f"rank-{rank}-{launch}").read_text() for launch in range(2) for rank in range(2)]
    assert stores[0] == stores[1] != "" and stores[2] == stores[3] != stores[0]
    assert not Path(stores[0]).parent.exists()
    steps = WARM_UP + 3
    assert found.losses == [{"one": [7.0] * steps, "two": [n + 0.25 for n in range(steps)]}] * 2
    assert [{name: len(times) for name, times in launch.items()} for launch in found.launches] == [
        {"one": 3, "two": 3}
    ] * 2
    assert all(second >= 2 * UNIT for launch in found.launches for second in launch["two"])  # its slowest rank's
    assert found.memory["two"].built_mb > 10 and found.memory["two"].steady_mb > 10 and len(found.foreign) == 6


def test_calls_of_one_process_are_compared_among_themselves(forked: None):
    system = System("both", several, has_loss=False, times_itself=True)
    pairs = lambda calls: [Pair("long of short", "long", "short")] if "long" in calls else []  # noqa: E731
    group = Group("title", [system], pairs=pairs, again=False)
    (row,) = rows_of(group, measure([system], launches=2, rounds=2))
    assert (row["system"], row["ratio"], row["ci95"]) == ("long of short", 4.0, [4.0, 4.0])


def test_a_rank_that_fails_ends_the_comparison(forked: None, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(EOFError):
        measure([System("broken", broken, ranks=2)], launches=1, rounds=1)
    assert "rank 1 cannot" in capfd.readouterr().err


def test_ratios_are_of_the_same_round_and_the_launch_is_the_unit():
    launches = [{"a": [2.0, 20.0, 2.0], "ref": [1.0, 10.0, 4.0]}, {"a": [8.0], "ref": [1.0]}]
    found = ratio(launches, "a", "ref")
    assert found.value == pytest.approx(4.0)  # the geometric mean of 2 and 8
    # Two launches: Student's t of one degree of freedom, 12.706, times stdev(ln 2, ln 8) / sqrt(2) = ln 2
    assert found.low == pytest.approx(4.0 * 2**-12.706) and found.high == pytest.approx(4.0 * 2**12.706)
    assert ratio(launches, "a", "ref", divide_by=2).value == pytest.approx(8.0)
    assert (interval([3.0]).low, interval([3.0]).high) == (0.0, math.inf)
    assert seconds(launches, "a") == 5.0


def test_spread_is_the_middle_half_of_the_steps():
    assert spread([{"a": [1.0, 2.0, 3.0]}, {"a": [4.0, 5.0, 6.0, 7.0]}], "a") == pytest.approx(4.0 / 4.0)
    assert spread([{"a": [2.0]}], "a") == 0.0


def test_an_interval_holds_the_truth_as_often_as_it_says():
    """Launches that differ by 3 %: 95 % of the intervals hold the true ratio."""
    drawn = 0.03 * torch.randn((2000, 3), generator=torch.Generator().manual_seed(0))
    found = [interval(launches) for launches in drawn.exp().tolist()]
    held = sum(one.low <= 1.0 <= one.high for one in found) / len(found)
    assert 0.935 <= held <= 0.965


def test_losses_are_compared_on_common_steps_over_all_groups():
    first, second = {"a": [1.0, 2.0], "b": [1.0, 2.0]}, {"c": [1.0, 2.0, 9.0], "d": [1.0, 2.2]}
    assert loss_difference([first]) == 0.0
    assert loss_difference([first, second]) == pytest.approx(0.1)
    assert loss_difference([{"a": [1.0]}]) is None


def test_a_bound_is_scaled_by_what_processes_lose_to_each_other():
    launches = [{"ref": [1.0], "two": [1.1], "a": [0.8]}] * 2
    systems = [System(name, alone) for name in ("ref", "two", "a")]
    group = Group("title", systems, divide_by=2, again=False, bounds={"a": 1.2}, scale_bounds_by="two")
    rows = rows_of(group, Measured(launches, [], dict.fromkeys(("ref", "two", "a"), Memory(1, 1)), []))
    assert rows[2]["bound"] == pytest.approx(1.2 * 1.1) and "bound" not in rows[0]
    assert rows[0]["ratio"] == pytest.approx(2.0)


@pytest.fixture
def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_options(parser)
    return parser.parse_args(["--launches", "2", "--pairs", "4", "--save"])


def test_reports_are_kept_and_read_again(
    forked: None, options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr("sys.argv", [str(figures.ROOT / "scripts/bench/single.py"), "--save"])
    systems = [System("plain", alone, (7.0,)), System("ours", alone, (7.07,), transport="sockets")]
    for title in ("one", "two", "one"):
        assert run([Group(title, systems, absent={"peer": "not installed"})], options) == 0
    printed = capsys.readouterr().out
    kept = figures.read(tmp_path / "figures/single.json")
    assert [one["title"] for one in kept] == ["two", "one"]
    report = kept[-1]
    assert report["command"] == "python scripts/bench/single.py" and report["machine"] and report["commit"]
    assert (report["launches"], report["rounds"]) == (2, 2)
    assert report["loss_difference"] == pytest.approx(0.01)
    assert [row["system"] for row in report["rows"]] == ["plain", "plain, again", "ours", "peer"]
    assert figures.table(report) in printed and "| peer | not installed |" in printed
    options.json, options.save = True, False
    run([Group("one", systems), Group("two", systems[:1])], options)
    found = json.loads(capsys.readouterr().out)
    assert {"machine", "versions", "floor_s", "rows"} <= set(found)
    assert [(row["group"], row["system"]) for row in found["rows"]][3:] == [("two", "plain"), ("two", "plain, again")]
    assert {"system", "ratio", "ci95", "peak_mb", "seconds"} <= set(found["rows"][0])


def kept(folder: Path, name: str, **rows: tuple[float, float, float]) -> Path:
    """Write the figures of a run: the ratio and the interval of each row."""
    cells = [{"system": row, "ratio": ratio, "ci95": [low, high]} for row, (ratio, low, high) in rows.items()]
    (folder / name).write_text(json.dumps([{"title": "small", "rows": cells}]))
    return folder / name
