"""The sweep of learning rates: which runs are trained, and when one curve reaches another."""

import json
from pathlib import Path

import pytest

from scripts.bench.rates import METRIC, Runs, reached, reports, wanted

LAST = 20


def write(folder: Path, run: str, curve: list[tuple[int, float]]) -> None:
    (folder / run).mkdir()
    rows = [{"step": 1, "loss": 4.0}, *({"step": step, METRIC: bits} for step, bits in curve)]
    (folder / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_curve_reaches_a_value_between_its_points() -> None:
    curve = [(10, 2.0), (20, 1.0), (30, 0.5)]
    assert reached(curve, 1.5) == 15 and reached(curve, 0.75) == 25 and reached(curve, 1.0) == 20
    assert reached(curve, 2.5) == 10 and reached(curve, 0.4) == float("inf")


def test_a_run_that_was_cut_short_is_not_whole(tmp_path: Path) -> None:
    write(tmp_path, "muon_1e-3_1", [(10, 2.0)])
    write(tmp_path, "adamw_1e-3_1", [(10, 2.0), (20, 1.5)])
    runs = Runs(tmp_path, [1], LAST)
    assert runs.curve("muon_1e-3_1") == runs.curve("muon_3e-3_1") == [] and runs.final("adamw_1e-3") == [1.5]


def test_the_tables_compare_equal_seeds(tmp_path: Path) -> None:
    for run, _ in wanted([1, 2]):
        name, seed = run.split("_")[0], int(run[-1])
        better = {"muon": 0.5, "narrow": -0.01}.get(name, 0.0) + ("_3e-3_" in run) * 0.1
        write(tmp_path, run, [(10, 2.0 + seed - better), (20, 1.0 + seed - better)])
    rates, steps, narrow = reports(Runs(tmp_path, [1, 2], LAST), "6e-3")
    of_rate = {row["system"]: row["columns"] for row in rates["rows"]}
    assert of_rate["learning rate 3e-3"]["AdamW"] == pytest.approx(2400)
    assert of_rate["learning rate 3e-3"]["Muon, largest - smallest"] == pytest.approx(1000)
    best, shipped = (row["columns"]["share of AdamW's steps"] for row in steps["rows"])
    assert best == pytest.approx(0.75) and shipped == pytest.approx(0.75)
    assert narrow["rows"][1]["columns"]["at most"] == pytest.approx(0.5)
