"""Planted faults are found, each ten times beyond its tolerance, in the precisions of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero import planting
from megazero.__main__ import main
from megazero.certified_rank import Results
from megazero.certified_state import not_held_once, stale_replica, wrong_sample
from megazero.planted_faults import DATA, FAULTS, Fault
from megazero.planting import DTYPES, NOTHING, SCALES, names, plant, table
from tests.tiny_run import TinyData

SHAPE = ("model.hidden=32", "model.heads=4", "model.seq_len=16", "model.layers=2", "data.valid=null")
# What a certificate missed when it trained with the config's decay and a small learning rate.
MISSED = ("no-decay", "misplaced-decay", "loose-clip", "frozen-norms", "wrong-lr")


def check(found: list[planting.Planted]) -> None:
    assert [each for each in found if not each.right] == []
    assert all(each.times >= 10 for each in found if each.fault in MISSED)
    assert all(each.times > 1 for each in found if each.fault != NOTHING)
    assert all(each.times < 1 for each in found if each.fault == NOTHING)


@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), pytest.param(("fp64", "fp16"), marks=pytest.mark.full)], ids=str)
def test_what_was_missed_is_found(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtypes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(planting, "DTYPES", dtypes)
    found = list(plant(tiny_data.load(tmp_path, *SHAPE), MISSED, 4))
    assert [(each.fault, each.dtype) for each in found] == [(name, dtype) for dtype in dtypes for name in MISSED]
    check(found)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_fault_is_found_in_every_precision(tiny_data: TinyData, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--config", str(tiny_data.config), "--plant", "--json", *SHAPE]) == 0
    rows = [row | {"times": row["times"] or float("inf")} for row in json.loads(capsys.readouterr().out)["planted"]]
    found = [planting.Planted(**row) for row in rows]
    check(found)
    assert {(each.fault, each.dtype) for each in found} == {(name, dtype) for name in names() for dtype in DTYPES}
    scales = {(each.fault, each.dtype): each.scale for each in found if each.fault in SCALES}
    assert all(scales[name, "fp64"] <= 1e-12 and scales[name, "fp32"] <= 1e-4 for name in SCALES)
    assert all(1e-4 < scales[name, dtype] <= 2**-5 for name in SCALES for dtype in ("bf16", "fp16"))


def test_what_is_not_found_is_a_failure(
    tiny_data: TinyData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a fault that changes nothing."""
    monkeypatch.setattr(planting, "FAULTS", (Fault("none", "nothing is wrong", DATA, lambda rig: None),))
    monkeypatch.setattr(planting, "DTYPES", ("fp32",))
    assert main(["certify", "--config", str(tiny_data.config), "--fault", "none", "--steps", "1", *SHAPE]) == 1
    assert "| nothing is wrong | dp2 zero1 | MISSED: " in capsys.readouterr().out


def test_what_cannot_be_planted_is_refused(tiny_data: TinyData, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["certify", "--config", str(tiny_data.config), *SHAPE]
    assert main([*line, "--fault", "no-such"]) == 2
    assert capsys.readouterr().err.startswith("MZ-100 certify: --fault no-such: expected one of nothing, no-decay")
    assert main([*line, "--fault", "no-decay", "model.heads=1"]) == 2
    assert "the config cannot be trained as tp2 sequence" in capsys.readouterr().err


def test_names_are_distinct_and_in_the_table() -> None:
    assert len(set(names())) == len(names()) == len(FAULTS) + 3
    rows = [planting.Planted(fault.name, fault.what, str(fault.layout), "fp32", "update", 20, True) for fault in FAULTS]
    assert all(f"| {fault.what} | {fault.layout} |  | update, 20 |" in table(rows, 4) for fault in FAULTS)


def results(
    held: list[tuple[str, int, int]], data_rank: int = 0, samples: list[int] | None = None, **shapes: list[int]
) -> Results:
    return Results(
        [0.0], [0.0], {}, {}, held, shapes or {"w": [4, 3]}, data_rank, [[(i, str(i)) for i in samples or []]]
    )


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ([("w", 0, 5)], [("w", 5, 12)], None),
        ([("w", 5, 12)], [("w", 0, 5)], None),
        ([("w", 0, 5), ("w", 5, 12)], [], None),
        ([("w", 0, 5)], [("w", 6, 12)], "element 5 of w, which has 12, is held by nobody"),
        ([("w", 0, 5)], [("w", 5, 11)], "element 11 of w, which has 12, is held by nobody"),
        ([("w", 1, 5)], [("w", 5, 12)], "element 0 of w, which has 12, is held by nobody"),
        ([], [], "element 0 of w, which has 12, is held by nobody"),
        ([("w", 0, 5)], [("w", 4, 12)], "element 4 of w is held by rank 0 and by rank 1"),
        ([("w", 0, 12)], [("w", 0, 12)], "element 0 of w is held by rank 0 and by rank 1"),
        ([("w", 0, 12), ("w", 3, 4)], [], "element 3 of w is held by rank 0 and by rank 0"),
        ([("w", 0, 5)], [("w", 5, 13)], "element 12 of w, which has 12, is held by rank 1"),
    ],
)
def test_every_element_is_held_once(first: list, second: list, line: str | None) -> None:
    assert not_held_once([results(first), results(second)]) == line


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("rows", [None, (1, 2)])
def test_every_rank_computes_with_what_would_be_saved(rows: tuple[int, int] | None, wrong: bool) -> None:
    """In its own dtype, its own rows of it."""
    weights = {"w": torch.linspace(0, 1, 12)}
    mine = weights["w"].view(4, 3)[slice(1, 3) if rows else slice(None)].bfloat16()
    mine[-1, -1] += 2**-7 * wrong  # a unit of its last place
    rank = replace(results([]), rows={"w": rows} if rows else {}, stored={"weight/0/w": mine})
    line = "after the last step: weight w of rank 0 is not the one that would be saved"
    assert stale_replica([rank], weights) == (line if wrong else None)


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([(0, [0, 1]), (1, [2, 3])], None),
        ([(0, [1, 0]), (0, [0, 1]), (1, [3, 2]), (1, [2, 3])], None),
        ([(0, [0, 1]), (0, [0, 2]), (1, [2, 3])], "rank 1 has other samples than the first rank of its data rank"),
        ([(0, [0, 1]), (1, [1, 2])], "samples [0, 1, 1, 2], expected [0, 1, 2, 3]"),
        ([(0, [0, 1]), (1, [2])], "samples [0, 1, 2], expected [0, 1, 2, 3]"),
    ],
)
def test_samples_are_those_of_one_process(ranks: list, line: str | None) -> None:
    found = wrong_sample([results([], rank, samples) for rank, samples in ranks], results([], 0, [0, 1, 2, 3]))
    assert found == (line and f"step 1: {line}")
