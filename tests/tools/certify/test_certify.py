"""The certificate: every layout is certified, and one that computes something else is found and named."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megazero.__main__ import main
from megazero.config.schema import Config
from megazero.plan.job import Job
from megazero.tools.certify.certify import Certificate, certify
from megazero.tools.certify.layouts import (
    alone_of,
    cover_of,
    layouts_of,
    pairs_missed,
    sample_of,
    with_one_process,
)
from megazero.tools.certify.tolerances import GRADIENT_FP32
from megazero.zero.unit_gradients import UnitGradients
from megazero.zero.unit_parameters import UnitParameters
from tests.tiny_run import TinyData

SHAPE = ("model.hidden=32", "model.heads=8", "model.seq_len=16", "model.dropout=0.1", "data.valid=null")
SMALL = (*SHAPE, "model.layers=4", "batch.global=8", "batch.micro=1")
LARGE = (*SHAPE, "model.layers=8", "batch.global=8", "batch.micro=1", "data.mask_eod=true")
FLAVOURS = {
    "gpt": (),
    "llama": ("model.tie_embeddings=false", "model.position=rotary", "model.norm=rmsnorm", "model.activation=swiglu"),
}


def config_of(tiny_data: TinyData, tmp_path: Path, *options: str) -> Config:
    return tiny_data.load(tmp_path, *options)


def laid_out(config: Config, *layouts: dict[str, Any]) -> list[Job]:
    """The config's job with other values of some fields."""
    return [replace(alone_of(config), **layout) for layout in layouts]


def faults_of(config: Config, layouts: list[Job], steps: int) -> list[str]:
    """What a certificate of layouts finds; quantised ones are certified in a model that is wide enough for it.

    So wide that matrices have most blocks of codes for themselves: beside a norm's ones a small weight is rounded to
    next to nothing.
    """
    wide = config.model_copy(update={"model": config.model.model_copy(update={"hidden": 128, "ffn": 512})})
    coded = [replace(job, shape=alone_of(wide).shape) for job in layouts if job.parameter_bits or job.gradient_bits]
    plain = [job for job in layouts if not (job.parameter_bits or job.gradient_bits)]
    rows = [*certify(config, plain, steps), *certify(wide, coded, steps)]
    assert len(rows) == len(layouts) > 0
    return [f"{row.layout}: {row.fault}" for row in rows if row.fault]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cover_of_all_layouts_is_certified(tiny_data: TinyData, tmp_path: Path, ranks: int) -> None:
    """In fp64, tied: what two schedules, stages or sizes go together goes together here."""
    config = config_of(tiny_data, tmp_path, *SMALL, "precision.dtype=fp64")
    layouts = cover_of(layouts_of(config, ranks))
    assert len(layouts) >= 5 and {layout.ranks for layout in layouts} == set(range(2, ranks + 1))
    assert faults_of(config, layouts, 2) == []


LATE = {"offload_optimizer": "cpu", "delayed": True}
FEW: list[dict[str, Any]] = [
    {"tensor": 2, "sequence": True, "tensor_chunks": 2, "recompute": "full"},
    {"data": 2, "stage": 2, "offload_optimizer": "cpu"},
    {"pipeline": 2, "schedule": "zb-v", "chunks": 2} | LATE,
    {"data": 2, "stage": 3, "recompute": "selective", "offload_parameters": "cpu"} | LATE,
    {"tensor": 2, "recompute": "full", "partition": True, "offload": "cpu", "offload_optimizer": "cpu"},
    {"tensor": 2, "recompute": "full", "partition": True, "offload": "nvme"},
    {"data": 2, "stage": 3, "recompute": "full"},
]


FULL = [pytest.param(dtype, marks=pytest.mark.full) for dtype in ("fp64", "fp32", "fp16")]


@pytest.mark.parametrize("dtype", ["bf16", *FULL])
def test_a_few_layouts_are_certified_in_every_precision(tiny_data: TinyData, tmp_path: Path, dtype: str) -> None:
    """With what is offloaded and updated late; and not one is compared with nothing."""
    config = config_of(tiny_data, tmp_path, *SMALL, "batch.global=4", f"precision.dtype={dtype}")
    rows = list(certify(config, laid_out(config, *FEW), 2))
    assert [f"{row.layout}: {row.fault}" for row in rows if row.fault] == []
    measures = {"initial weights", "loss", "gradient norm", "later norms", "first gradients", "weights", "samples"}
    measures |= {"skipped steps", "held once", "replicas", "first moment", "second moment", "update", "size of updates"}
    assert all(set(row.times) == measures and max(row.times.values()) < 1 for row in rows)


GROUPS = 2


@pytest.fixture(scope="module")
def eight(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """A cover of all layouts of up to eight ranks."""
    layouts = cover_of(layouts_of(config_of(tiny_data, tmp_path_factory.mktemp("eight"), *LARGE), 8))
    assert len(layouts) > 100 and sum(layout.ranks == 8 for layout in layouts) > 70
    return layouts


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("group", range(GROUPS))
def test_layouts_of_eight_ranks_are_certified(
    tiny_data: TinyData, tmp_path: Path, eight: list[Job], group: int, flavour: str
) -> None:
    """In fp32, half of the cover in each flavour: every two values that go together do so in one of them."""
    config = config_of(tiny_data, tmp_path, *LARGE, *FLAVOURS[flavour])
    shape = alone_of(config).shape
    half = [replace(layout, shape=shape) for layout in eight[list(FLAVOURS).index(flavour) :: len(FLAVOURS)]]
    assert faults_of(config, half[group::GROUPS], 2) == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", range(GROUPS))
def test_forty_quantised_layouts_are_certified(tiny_data: TinyData, tmp_path: Path, group: int) -> None:
    """Of up to 4 ranks, in fp32, each within the tolerance of its codes; with error feedback too."""
    config = config_of(tiny_data, tmp_path, *SMALL)
    coded = [layout for layout in layouts_of(config, 4) if layout.parameter_bits or layout.gradient_bits]
    layouts = sample_of(coded, 40)
    assert len(layouts) >= 40 and any(layout.error_feedback for layout in layouts)
    assert faults_of(config, layouts[group::GROUPS], 3) == []


BITWISE: list[dict[str, Any]] = [
    {"pipeline": 2},
    {"pipeline": 4, "schedule": "gpipe"},
    {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    {"pipeline": 3, "schedule": "zb-h1"},
    {"pipeline": 2, "schedule": "zb-v", "chunks": 2},
]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_sums_in_another_dtype_have_a_tolerance_of_their_own(tiny_data: TinyData, tmp_path: Path, dtype: str) -> None:
    """In fp32 it is needed: by that of fp32 alone the first gradients would be wrong."""
    config = config_of(tiny_data, tmp_path, *SMALL, f"precision.dtype={dtype}", "zero.reduce_dtype=bf16")
    layouts: list[dict[str, Any]] = [
        {"data": 2, "stage": 0},
        {"data": 4, "stage": 3, "shard_ranks": 2, "offload_optimizer": "cpu"},
        {"data": 2, "stage": 2, "pipeline": 2, "schedule": "zb-h1"},
    ]
    rows = list(certify(config, laid_out(config, *layouts), 2))
    for row in rows:
        print(row.layout, row.times)
    assert [f"{row.layout}: {row.fault}" for row in rows if row.fault] == []
    assert dtype != "fp32" or all(row.worst["first gradients"] > 10 * GRADIENT_FP32 for row in rows)


MIXED = ("model.kv_heads=2", "model.activation=swiglu", "model.position=rotary")
SHAPES = {
    "gpt": FLAVOURS["gpt"],
    "llama": (*FLAVOURS["llama"], "model.kv_heads=2"),
    "mixed": MIXED,  # LayerNorm with biases around a gate, tied
    "rms": ("model.norm=rmsnorm",),
}
REFERENCE = [
    ("gpt", "fp64", ("data.mask_eod=true",)),
    ("llama", "bf16", ("data.mask_eod=true",)),
    pytest.param("llama", "fp64", ("data.mask_eod=true", "data.pack=true", "batch.micro=2"), marks=pytest.mark.full),
    pytest.param("mixed", "fp32", ("data.mask_eod=true",), marks=pytest.mark.full),
    pytest.param("rms", "fp32", (), marks=pytest.mark.full),
    pytest.param("gpt", "fp16", (), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("shape", "dtype", "options"), REFERENCE)
def test_one_process_is_what_the_reference_is(
    tiny_data: TinyData, tmp_path: Path, shape: str, dtype: str, options: tuple[str, ...]
) -> None:
    """On time and a step late. In fp64 and fp32 by the tolerances of two processes, a fifth of them."""
    small = ("model.layers=2", "batch.global=4", f"precision.dtype={dtype}")
    config = config_of(tiny_data, tmp_path, *SMALL, *SHAPES[shape], *small, *options)
    rows = list(certify(config, with_one_process(laid_out(config, {"data": 2}, LATE))[:2], 3))
    assert [row.layout.ranks for row in rows] == [1, 1] and rows[1].layout.delayed
    for row in rows:
        print(row.layout, row.times)
    assert [row.fault for row in rows if row.fault] == []
    assert dtype in ("bf16", "fp16") or all(max(row.times.values()) < 0.2 for row in rows)
    assert not any(row.bitwise for row in rows)  # they are computed by two programs


OVERFLOWS: list[dict[str, Any]] = [
    {"data": 2, "stage": 3, "quantize_gradients": "int8"},
    {"pipeline": 2},
    {"data": 2, "stage": 1, "quantize_gradients": "int8"},
]


def test_an_overflow_is_skipped_alike(tiny_data: TinyData, tmp_path: Path) -> None:
    """In the second of three steps; the third one updates again."""
    config = config_of(tiny_data, tmp_path, *SMALL, "model.layers=2", "batch.global=2", "precision.dtype=fp16")
    certificate = Certificate(config, 3)
    rows = [certificate.row(job) for job in with_one_process(laid_out(config, *OVERFLOWS))]
    assert [row.fault for row in rows] == [None] * 4
    assert certificate.one_process(delayed=False).skips == [[False, 65536.0], [True, 32768.0], [False, 32768.0]]


def test_a_pipeline_alone_changes_no_bit(tiny_data: TinyData, tmp_path: Path) -> None:
    """Of an untied model. A tied one adds the two uses of its weight in another order."""
    config = config_of(tiny_data, tmp_path, *SMALL, *FLAVOURS["llama"], "batch.global=4")
    assert all(row.bitwise for row in certify(config, laid_out(config, *BITWISE), 2))


@pytest.mark.full
def test_a_doubled_gradient_is_found_and_named(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the second stage, of one data rank, in layouts that have several."""
    name, close = "blocks.3.mlp.down.weight", UnitGradients.close

    def close_and_double(gradients: UnitGradients) -> None:
        close(gradients)
        if name in gradients.views and gradients._shares and gradients._resting.shard.start > 0:
            gradients.views[name].view.mul_(2)

    monkeypatch.setattr(UnitGradients, "close", close_and_double)
    config = config_of(tiny_data, tmp_path, *SMALL)
    good, bad = certify(config, laid_out(config, {"pipeline": 2}, {"pipeline": 2, "data": 2}), 2)
    assert good.fault is None and bad.fault is not None
    assert bad.fault.startswith(f"step 1: gradient of {name} of rank 2, ")  # the second stage's first rank
    code = main(
        [
            "certify",
            "--config",
            str(tiny_data.config),
            "--max-ranks",
            "2",
            "--layouts",
            str(len(cover_of(layouts_of(config, 2)))),
            "--steps",
            "2",
            *SMALL,
            "--json",
        ]
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {row["name"] for row in rows if row["fault"]}
    words = {row["name"]: set(row["name"].split()) for row in rows}
    split = {name for name, said in words.items() if "dp2" in said and not said & {"zero0", "shard1"}}
    coded = {name for name in split if "gradients-int4" in words[name]}  # of these no gradient is held alone
    assert code == 1 and split - coded <= found <= split and len(split - coded) > 3


def test_a_layout_that_fails_is_a_fault(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(parameters: UnitParameters) -> None:
        raise RuntimeError("a fault of this test")

    config = config_of(tiny_data, tmp_path, *SMALL)
    monkeypatch.setattr(UnitParameters, "start_gather", fail)
    (row,) = certify(config, laid_out(config, {"data": 2, "stage": 3}), 1)
    assert row.fault is not None and "MZ-390" in row.fault


def test_layouts_are_those_that_the_config_admits(tiny_data: TinyData, tmp_path: Path) -> None:
    config = config_of(tiny_data, tmp_path, *SMALL)
    layouts = layouts_of(config, 4)
    assert len(layouts) == len(set(layouts)) > 150
    assert max(layout.ranks for layout in layouts) == 4
    assert all(layout.pipeline * layout.chunks <= 4 and layout.tensor in (1, 2, 4) for layout in layouts)
    cover = cover_of(layouts)
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
        assert {layout.stage for layout in cover if layout.schedule == schedule} == {0, 1, 2, 3}
    assert {(one.sequence, one.tensor_chunks) for one in cover if one.tensor > 1} == set(product((False, True), (1, 2)))
    more = sample_of(layouts, len(cover) + 20)
    assert more[: len(cover)] == cover and len(set(more)) == len(cover) + 20
    assert pairs_missed(layouts, cover)[0] == 0
    missed, pairs = pairs_missed(layouts, cover[:6])
    assert 0 < missed < pairs and sample_of(cover, len(cover)) == cover


def test_nothing_to_compare_is_no_certificate(tiny_data: TinyData, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--config", str(tiny_data.config), "--max-ranks", "1"]) == 2
    assert capsys.readouterr().err.startswith("MZ-106 certify: no layout of up to 1 ranks to compare")
