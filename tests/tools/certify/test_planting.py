"""Planted faults are found, each ten times beyond its tolerance, in the precisions of a run."""

import json
from pathlib import Path

import pytest

from megazero.__main__ import main
from megazero.builders.job import job_of
from megazero.tools.certify import planting
from megazero.tools.certify.planted_faults import DATA, FAULTS, Fault
from megazero.tools.certify.planting import ALL, DTYPES, NOTHING, names, plant, table
from megazero.tools.certify.training import Rig
from tests.layouts import job_on
from tests.tiny_run import TinyData

SHAPE = ("model.hidden=32", "model.heads=4", "model.seq_len=16", "model.layers=2", "data.valid=null")
# What a certificate missed when it trained with the config's decay and a small learning rate.
MISSED = ("no-decay", "misplaced-decay", "loose-clip", "frozen-norms", "wrong-lr")


def check(found: list[planting.Planted]) -> None:
    assert [each for each in found if not each.right] == []
    assert all(each.times >= 10 for each in found if each.fault in MISSED)
    assert all(each.times > 1 for each in found if each.fault != NOTHING)
    assert all(each.times < 1 for each in found if each.fault == NOTHING)


@pytest.mark.parametrize("dtypes", [("bf16",), pytest.param(("fp64", "fp32", "fp16"), marks=pytest.mark.full)], ids=str)
def test_what_was_missed_is_found(tiny_data: TinyData, tmp_path: Path, dtypes: tuple[str, ...]) -> None:
    found = list(plant(tiny_data.load(tmp_path, *SHAPE), MISSED, 4, dtypes=dtypes))
    assert [(each.fault, each.dtype) for each in found] == [(name, dtype) for dtype in dtypes for name in MISSED]
    check(found)


# On both sides of a comparison, or smaller than what codes lose.
REFERENCE = ("across-documents", "larger-own", "inverted-residuals")


def test_the_reference_finds_what_no_comparison_of_layouts_does(tiny_data: TinyData, tmp_path: Path) -> None:
    """A hundred times beyond the tolerance, where fp32 is compared."""
    found = list(plant(tiny_data.load(tmp_path, *SHAPE), REFERENCE, 2, dtypes=("fp32",)))
    assert [each.fault for each in found] == list(REFERENCE)
    check(found)
    assert all(each.times > 100 for each in found)
    assert [each.measure for each in found[1:]] == ["codes", "codes"]


REDUCED = [
    ("fp32", ("rough-sums", "wrong-lr")),
    pytest.param("bf16", ("rough-sums", "wrong-lr"), marks=pytest.mark.full),
    pytest.param("fp32", (NOTHING, *MISSED), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("dtype", "names"), REDUCED)
def test_they_are_found_beside_sums_in_another_dtype(
    tiny_data: TinyData, tmp_path: Path, dtype: str, names: tuple[str, ...]
) -> None:
    """Although gradients that are summed in bf16 have a wider tolerance."""
    found = list(plant(tiny_data.load(tmp_path, *SHAPE, "zero.reduce_dtype=bf16"), names, 4, dtypes=(dtype,)))
    assert {each.fault for each in found} == set(names)
    for each in found:
        print(each)
    assert all(each.right and (each.times > 1) == (each.fault != NOTHING) for each in found)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_fault_is_found_in_every_precision(
    tiny_data: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", "--config", str(tiny_data.config), "--plant", "--json", *SHAPE]) == 0
    rows = [row | {"times": row["times"] or float("inf")} for row in json.loads(capsys.readouterr().out)["planted"]]
    found = [planting.Planted(**row) for row in rows]
    check(found)
    everywhere = {(NOTHING, dtype) for dtype in DTYPES}
    alone = job_of(tiny_data.load(tmp_path, *SHAPE), 1)
    planted = {(f.name, dtype) for f in FAULTS for dtype in DTYPES if f.can_be(alone, dtype, summed=False)}
    # Two overflow, two feed back what rounding loses, one needs QK-norm.
    assert len(planted) == 4 * len(FAULTS) - 2 * 3 - 2 - 4
    planted |= {("not-gelu", "fp64"), ("not-gelu", "fp32")}  # the one option of this model that has a fault
    assert {(each.fault, each.dtype) for each in found} == everywhere | planted


def test_what_is_not_found_is_a_failure(tiny_data: TinyData, tmp_path: Path) -> None:
    """Such as a fault that changes nothing, and one that ends the ranks, behind which others are planted still."""

    def fail(rig: Rig) -> None:
        raise RuntimeError("a fault of this test")

    faults = (
        Fault("none", "nothing is wrong", DATA, lambda rig: None),
        Fault("fails", "ranks end", DATA, fail),
        Fault("no-decay", "weight decay is dropped", DATA, FAULTS[0].plant),
    )
    names = [fault.name for fault in faults]
    found = list(plant(tiny_data.load(tmp_path, *SHAPE), names, 1, dtypes=("fp32",), faults=faults))
    assert [each.right for each in found] == [False, False, True]
    first, second, _ = table(found, 1).splitlines()[-3:]
    assert first.startswith("| nothing is wrong | dp2 zero1 |  | MISSED: ")
    assert second.startswith("| ranks end | dp2 zero1 |  | MISSED: does not run: MZ-390")


def test_what_cannot_be_planted_is_refused(tiny_data: TinyData, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["certify", "--config", str(tiny_data.config), *SHAPE]
    assert main([*line, "--fault", "no-such"]) == 2
    assert capsys.readouterr().err.startswith("MZ-100 certify: --fault no-such: expected one of nothing, no-decay")
    assert main([*line, "--fault", "no-decay", "model.heads=1"]) == 2
    assert "faults are planted into the layout tp2 sequence" in capsys.readouterr().err


def test_names_are_distinct_and_in_the_table() -> None:
    assert len(set(names())) == len(names()) == len(ALL) + 1
    layouts = {fault.name: str(fault.layout(job_on(stage=1))) for fault in FAULTS}
    rows = [planting.Planted(f.name, f.what, layouts[f.name], "fp32", "update", 20, True) for f in FAULTS]
    assert all(f"| {f.what} | {layouts[f.name]} |  | update, 20 |" in table(rows, 4) for f in FAULTS)
