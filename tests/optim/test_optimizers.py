"""Every optimizer is equal to an independent one in every kind of layout, as the certificate measures it."""

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.__main__ import main
from megazero.builders.assemble import build_model
from megazero.config.file import load
from megazero.model.parameter import declaration_of, whole_shapes
from megazero.run.history import differences
from megazero.tools.certify.certify import Certificate
from megazero.tools.certify.planted_optimizers import OPTIMIZER_FAULTS
from megazero.tools.certify.planting import NOTHING, plant
from megazero.tools.dry_run.dry_run import simulate
from megazero.tools.planning.parameters import rows
from tests.tiny_run import TinyData
from tests.tools.certify.test_planting import SHAPE, check

MIXED = "optimizer.groups=[{match: '*mlp*', name: lion, lr_factor: 0.5}, {match: '*qkv*', clip: 0.01, weight_decay: 2}]"
OPTIMIZERS = {
    "muon": ("optimizer.name=muon",),
    "spectral": ("optimizer.name=muon", "optimizer.muon.scale=spectral", "optimizer.muon.nesterov=false"),
    "lion": ("optimizer.name=lion",),
    "sgd": ("optimizer.name=sgd",),
    "averages": ("optimizer.average.kind=ema", "optimizer.average.decay=0.6"),
    "mixed": ("optimizer.name=muon", MIXED, "optimizer.average.kind=ema", "optimizer.average.decay=0.4"),
}
LAYOUTS = {
    "data": {"data": 2, "stage": 0},
    "stage 1": {"data": 2, "stage": 1},
    "stage 2": {"data": 2, "stage": 2},
    "stage 3": {"data": 2, "stage": 3},
    "three ranks": {"data": 3, "stage": 3},
    "hybrid": {"data": 4, "stage": 1, "shard_ranks": 2},
    "tensor": {"tensor": 2, "sequence": True},
    "tensor and data": {"tensor": 2, "data": 2, "stage": 2},
    "tensor and copies": {"tensor": 2, "data": 2, "stage": 0},
    "pipeline": {"pipeline": 2, "data": 2, "stage": 1},
    "offload": {"data": 2, "stage": 2, "offload_optimizer": "cpu"},
    "offload both": {"data": 2, "stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "codes": {"data": 2, "stage": 1, "quantize_gradients": "int8"},
    "neighbours": {"data": 2, "stage": 3, "secondary_ranks": 2},
}
PLANNED = [
    ("optimizer.name=muon", "zero.stage=3", "parallel.tensor=2", "parallel.sequence=true"),
    ("optimizer.name=muon", MIXED, "zero.stage=1", "zero.shard_ranks=2", "optimizer.average.kind=ema"),
    ("optimizer.name=muon", "zero.stage=0", "parallel.tensor=2"),
    ("optimizer.name=muon", MIXED, "zero.stage=2", "zero.offload.optimizer=cpu"),
]
QUICK = [("muon", "three ranks"), ("muon", "tensor and data"), ("mixed", "hybrid"), ("spectral", "tensor and copies")]
QUICK += [("muon", "offload"), ("mixed", "data"), ("lion", "pipeline"), ("sgd", "stage 3")]
PAIRS = [(name, layout) for name in OPTIMIZERS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.full) for pair in PAIRS]
)
def test_layouts_are_equal_to_one_process(tiny_data: TinyData, tmp_path: Path, name: str, layout: str) -> None:
    micro = "batch.micro=1" if "three" not in layout else "batch.micro=2"
    more = (
        *("model.layers=3", "batch.global=12", micro, "precision.dtype=fp64", "model.kv_heads=2"),
        *OPTIMIZERS[name],
    )
    certificate = Certificate(tiny_data.load(tmp_path, *SHAPE, *more), 3)
    row = certificate.row(replace(certificate.alone, **LAYOUTS[layout]))  # type: ignore[arg-type]
    assert row.fault is None, row


FULL = [pytest.param(dtype, marks=pytest.mark.full) for dtype in ("fp64", "bf16", "fp16")]


@pytest.mark.parametrize("dtype", ["fp32", *FULL])
def test_planted_faults_are_found(tiny_data: TinyData, tmp_path: Path, dtype: str) -> None:
    config = tiny_data.load(tmp_path, *SHAPE, *OPTIMIZERS["muon"], *OPTIMIZERS["averages"])
    names = [NOTHING, *(fault.name for fault in OPTIMIZER_FAULTS if fault.name != "other-bits")]  # test_narrow
    found = list(plant(config, names, 3, dtypes=(dtype,), faults=OPTIMIZER_FAULTS))
    assert sorted(each.fault for each in found) == sorted(names)
    check(found)


def test_formulas_and_dry_run_agree() -> None:
    """Bytes of state and of buffers, and all traffic, on each rank: to the byte."""
    for rank, options in enumerate(PLANNED):
        sizes = ["batch.micro=1", "batch.global=8", "model.layers=5", "precision.dtype=bf16"]
        found = simulate(load("tiny", [*sizes, *options]), rank, 4, "cuda")
        held = {category: size.peak for category, size in found.ledger.bytes.items()}
        for category in ("matrices", "optimizer", "host_optimizer"):
            assert held.get(category, 0) == found.planned.held.get(category, 0), (options, category)
        traffic = {axis: {p: sent.bytes_sent for p, sent in of.items()} for axis, of in found.steady.traffic.items()}
        sent = {axis: {p: size for p, size in of.items() if size} for axis, of in traffic.items()}
        assert {axis: of for axis, of in sent.items() if of} == found.planned_traffic, options


NAMED = ("gemma2_2b", "olmo2_7b", "gpt2_124m", "command_r7b", "nemotron4_15b", "starcoder2_3b")


@pytest.mark.parametrize("name", NAMED)
def test_the_plan_has_the_names_and_shapes_of_the_model(name: str) -> None:
    config = load(name)
    model = build_model(config)
    decays = {n: declaration_of(p).decay for n, p in model.named_parameters()}
    listed = rows(config)
    assert {row["name"]: row["shape"] for row in listed} == whole_shapes(model)
    assert {row["name"]: row["weight_decay"] > 0 for row in listed} == decays


def test_parameters_are_listed_with_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--config", "tiny", "--gpus", "1", "--hardware", "h100-80gb", "--parameters"]
    assert main([*line, "optimizer.name=muon", MIXED, "optimizer.lr=0.001"]) == 0
    found = {text.split()[1]: text.split() for text in capsys.readouterr().out.splitlines()}
    assert found["blocks.*.attention.qkv.weight"][-4:] == ["muon", "0.001", "2", "*qkv*"]
    assert found["blocks.*.mlp.up.weight"][-4:] == ["lion", "0.0005", "0.1", "*mlp*"]
    assert found["head.norm.weight"][-4:] == ["adamw", "0.001", "0", "-"]
    assert main([*line[:-1], "optimizer.groups=[{match: '*qvk*'}]"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("MZ-107 optimizer.groups[0].match: '*qvk*' matches no parameter; ")


@pytest.mark.parametrize(
    ("groups", "changed"),
    [
        (["*qkv*", "*mlp*"], False),
        (["*mlp*", "*qkv*"], True),
        (["*qkv*", "*out*"], True),
    ],
)
def test_groups_are_compared_by_their_place(groups: list[str], changed: bool) -> None:
    """Two groups may name one optimizer, and the first that matches counts."""
    saved = {"optimizer.groups": [{"match": "*qkv*", "name": "adamw"}, {"match": "*mlp*", "name": "adamw"}]}
    ours = {"optimizer.groups": [{"match": match, "name": "adamw"} for match in groups]}
    assert bool(differences(saved, ours)) == changed
