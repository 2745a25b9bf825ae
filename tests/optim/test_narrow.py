"""Optimizer state in bf16, and parameters without masters: the roundings, the bytes, the layouts, the checkpoints."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.__main__ import main
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Scratch
from megazero.config.file import load as load_config
from megazero.kernels import counter
from megazero.optim.narrow import Narrow
from megazero.run.folder import RunFolder
from megazero.tools.certify.certify import Certificate
from megazero.tools.certify.planted_optimizers import OPTIMIZER_FAULTS
from megazero.tools.certify.planting import NOTHING, plant
from megazero.tools.dry_run.dry_run import simulate
from megazero.tools.opened import load
from tests.optim.test_averages import begin
from tests.optim.test_optimizers import LAYOUTS
from tests.run.going_on import go_on
from tests.tiny_run import TinyData, saved_bytes
from tests.tools.certify.test_planting import SHAPE, check

MOMENTS, MASTERS = "optimizer.moments=bf16", "precision.masters=none"
SETS = {
    "moments": ("precision.dtype=fp32", MOMENTS),
    "moments, masters": ("precision.dtype=bf16", MOMENTS),
    "no masters": ("precision.dtype=bf16", MASTERS),
    "neither": ("precision.dtype=bf16", MOMENTS, MASTERS),
    "muon": ("precision.dtype=bf16", MOMENTS, MASTERS, "optimizer.name=muon"),
    "lion": ("precision.dtype=bf16", MOMENTS, MASTERS, "optimizer.name=lion"),
    "sgd": ("precision.dtype=bf16", MOMENTS, MASTERS, "optimizer.name=sgd", "optimizer.lr=0.01"),
}


def rounded(values: Tensor, key: int, step: int) -> Tensor:
    """Round fp32 values as the product does, as elements 0, 1, ... of a parameter."""
    narrow, found = Narrow(0, {}, 0, Scratch(Ledger())), torch.empty_like(values, dtype=torch.bfloat16)
    piece = type("Piece", (), {"step": torch.tensor(float(step))})()
    narrow._spans[piece] = [(slice(0, len(values)), 0, key)]
    narrow.round_(piece, "masters", values.clone(), found, piece.step)
    return found


def test_the_mean_of_roundings_is_exact() -> None:
    ulp = 2.0**-7
    for share in (0.0, 0.01, 0.25, 0.5, 0.9):
        for sign in (1.0, -1.0):
            found = rounded(torch.full((1 << 18,), sign * (1.0 + share * ulp)), 7, 1).double()
            assert {*found.unique().tolist()} <= {sign, sign * (1.0 + ulp)}
            up = ((found - sign).abs() / ulp).mean().item()
            assert abs(up - share) <= 5 * (share * (1 - share) / len(found)) ** 0.5, share


def test_bits_depend_on_everything_and_not_on_the_interval() -> None:
    whole = counter.words(3, 0, 1000, torch.tensor(1.0))
    assert torch.equal(counter.words(3, 100, 200, torch.tensor(1.0)), whole[100:200])
    for other in (counter.words(4, 0, 1000, torch.tensor(1.0)), counter.words(3, 0, 1000, torch.tensor(2.0))):
        assert (other == whole).sum() == 0
    beyond = counter.words(3, 1 << 32, (1 << 32) + 1000, torch.tensor(1.0))
    assert (beyond == whole).sum() == 0


def test_values_that_do_not_change_stay() -> None:
    values = torch.randn(1000).bfloat16().float()
    values[:3] = torch.tensor([0.0, float("inf"), -0.0])
    assert torch.equal(rounded(values, 1, 1).float(), values)


QUICK = [("neither", "stage 3"), ("muon", "tensor and data"), ("no masters", "hybrid"), ("moments", "pipeline")]
QUICK += [("moments, masters", "offload"), ("lion", "three ranks"), ("sgd", "tensor")]
PAIRS = [(name, layout) for name in SETS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.full) for pair in PAIRS]
)
def test_layouts_are_equal_to_one_process(tiny_data: TinyData, tmp_path: Path, name: str, layout: str) -> None:
    micro = "batch.micro=1" if "three" not in layout else "batch.micro=2"
    more = ("model.layers=3", "batch.global=12", micro, "model.kv_heads=2", *SETS[name])
    certificate = Certificate(tiny_data.load(tmp_path, *SHAPE, *more), 3)
    row = certificate.row(replace(certificate.alone, **LAYOUTS[layout]))  # type: ignore[arg-type]
    assert row.fault is None, row


@pytest.mark.parametrize("name", ["no masters", pytest.param("neither", marks=pytest.mark.full)])
def test_other_bits_are_found(tiny_data: TinyData, tmp_path: Path, name: str) -> None:
    (fault,) = [fault for fault in OPTIMIZER_FAULTS if fault.name == "other-bits"]
    config = tiny_data.load(tmp_path, *SHAPE, *SETS[name])
    check(list(plant(config, [NOTHING, fault.name], 3, dtypes=("bf16",), faults=[fault])))


@pytest.mark.parametrize("name", SETS)
def test_one_process_is_equal_to_the_reference(tiny_data: TinyData, tmp_path: Path, name: str) -> None:
    certificate = Certificate(tiny_data.load(tmp_path, *SHAPE, *SETS[name]), 3)
    row = certificate.row(certificate.alone)
    assert row.fault is None, row


def test_a_parameter_takes_8_bytes_and_the_plan_says_so() -> None:
    sizes = ["batch.micro=1", "batch.global=4", "model.layers=5", "zero.grad_dtype=param"]
    for options in (["zero.stage=0"], ["zero.stage=2", "zero.shard_ranks=2"], ["zero.stage=1"], ["zero.stage=3"]):
        options += [*SETS["neither"], *sizes]
        found = simulate(load_config("tiny", options), 1, 4, "cuda")
        held = {category: size.now for category, size in found.ledger.bytes.items()}
        states = ("parameters", "gradients", "optimizer")
        assert all(held.get(one, 0) == found.planned.held.get(one, 0) for one in states), options
        if options[0] == "zero.stage=0":
            assert held["parameters"] + held["gradients"] + held["optimizer"] == 4 * held["parameters"]


@pytest.mark.parametrize(
    "name", ["neither", *(pytest.param(n, marks=pytest.mark.full) for n in ("muon", "moments, masters"))]
)
def test_a_resumed_run_rounds_alike(tiny_data: TinyData, tmp_path: Path, name: str) -> None:
    whole, cut, own = tmp_path / "whole", tmp_path / "cut", (*SETS[name], "zero.stage=2", "schedule.steps=6")
    begin(tiny_data, whole, *own, "run.steps=6", nproc=2)
    begin(tiny_data, cut, *own, "run.steps=3", nproc=2)
    assert go_on(tiny_data, cut, *own, "run.steps=6", nproc=2) == 0
    assert saved_bytes(RunFolder(cut)) == saved_bytes(RunFolder(whole))
    manifest = read_manifest(Store(RunFolder(whole).checkpoints).path(6))
    assert manifest.dtype == ("F32" if name == "moments, masters" else "BF16")
    assert {manifest.dtype_of(tensor, kind) for tensor in manifest.tensors for kind in manifest.kinds[1:]} == {"BF16"}


@pytest.mark.full
def test_a_run_may_change_between_them(tiny_data: TinyData, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bf16, more = "precision.dtype=bf16", ("schedule.steps=6", "zero.stage=1")
    begin(tiny_data, tmp_path, bf16, *more, "run.steps=2", nproc=2)
    assert go_on(tiny_data, tmp_path, *SETS["neither"], *more, "run.steps=4", nproc=2) == 0
    said = capfd.readouterr().out
    assert "optimizer.moments fp32 -> bf16" in said and "precision.masters fp32 -> none" in said
    assert go_on(tiny_data, tmp_path, bf16, *more, "run.steps=6", nproc=1) == 0
    store = Store(RunFolder(tmp_path).checkpoints)
    steps = [load(store.path(step), torch.float32).model.state_dict() for step in range(1, 7)]
    for before, after in pairwise(steps):
        for name, value in after.items():
            assert not torch.equal(value, before[name]) and (value - before[name]).abs().max() < 0.02, name


def test_what_cannot_be_is_refused(tiny_data: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "--config", str(tiny_data.config), f"run.dir={tmp_path}", MASTERS]
    assert main(line) == 2
    assert "only bf16 is rounded stochastically" in capsys.readouterr().err
    assert main([*line, "precision.dtype=bf16", "optimizer.average.kind=ema"]) == 2
    assert "averages need more digits" in capsys.readouterr().err
