"""Every optimizer is equal to an independent one in every kind of layout, as the certificate measures it."""

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config.file import load
from megazero.tools.certify.certify import Certificate
from megazero.tools.dry_run.dry_run import simulate
from tests.tiny_run import TinyData
from tests.tools.certify.test_planting import SHAPE

MIXED = "optimizer.groups=[{match: '*mlp*', name: lion, lr_factor: 0.5}, {match: '*qkv*', clip: 0.01, weight_decay: 2}]"
OPTIMIZERS = {
    "muon": ("optimizer.name=muon",),
    "spectral": ("optimizer.name=muon", "optimizer.muon.scale=spectral", "optimizer.muon.nesterov=false"),
    "lion": ("optimizer.name=lion",),
    "sgd": ("optimizer.name=sgd",),
    "mixed": ("optimizer.name=muon", MIXED),
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
    ("optimizer.name=muon", MIXED, "zero.stage=1", "zero.shard_ranks=2"),
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
