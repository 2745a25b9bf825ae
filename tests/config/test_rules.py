"""The tables: every row names real options, and for each row there is a config that breaks it and nothing else."""

from pathlib import Path

import pytest

from megazero.base.errors import FaultList
from megazero.config.file import load
from megazero.config.flat import option_keys
from megazero.config.rules import EXCLUSIONS, RELATIONS

# The options that break exactly this equation (others at their defaults), and a nearby value that holds.
BREAKS: dict[str, tuple[list[str], str]] = {
    "model.hidden % model.heads == 0 with model.head_dim null": (
        ["model.hidden=100", "model.heads=3"],
        "model.head_dim=32",
    ),
    "model.heads % model.kv_heads == 0": (["model.kv_heads=5"], "model.kv_heads=4"),
    "model.heads % parallel.tensor == 0": (["parallel.tensor=8", "model.kv_heads=4"], "parallel.tensor=4"),
    "model.kv_heads % parallel.tensor == 0, or parallel.tensor % model.kv_heads == 0 without model.qk_norm full": (
        ["parallel.tensor=4", "model.kv_heads=2", "model.qk_norm=full", "model.position=rotary"],
        "model.qk_norm=head",
    ),
    "model.ffn % parallel.tensor == 0": (["parallel.tensor=2", "model.ffn=3073"], "model.ffn=3074"),
    "batch.global % batch.micro == 0": (["batch.micro=3"], "batch.global=9"),
    "channels of a head, or their share in model.layer_kinds, come in pairs with model.position rotary": (
        ["model.position=rotary", "model.hidden=36"],
        "model.position=learned",
    ),
    "rope in model.layer_kinds has the options of its kind": (
        ["model.position=rotary", "model.layer_kinds={all: {rope: {kind: llama3, factor: 8}}}"],
        "model.layer_kinds.all.rope.original=8192",
    ),
    "rope in model.layer_kinds is not given with model.position learned": (
        ["model.layer_kinds={all: {rope: {share: 0.5}}}"],
        "model.position=rotary",
    ),
    "names in model.layer_pattern are in model.layer_kinds": (
        ["model.layer_pattern=[local, full]", "model.layer_kinds={local: {window: 9}}"],
        "model.layer_pattern=[local]",
    ),
    "model.norm_place == pre with model.residual parallel or parallel_shared": (
        ["model.residual=parallel", "model.norm_place=sandwich"],
        "model.norm_place=pre",
    ),
    "model.norm_bias == null with model.norm rmsnorm": (
        ["model.norm=rmsnorm", "model.norm_bias=true"],
        "model.norm=layernorm",
    ),
    "model.seq_len % parallel.tensor == 0 with parallel.sequence": (
        ["parallel.tensor=2", "parallel.sequence=true", "model.seq_len=1023"],
        "parallel.sequence=false",
    ),
    "parallel.tensor_chunks <= model.seq_len / parallel.tensor": (
        ["parallel.tensor=2", "parallel.tensor_chunks=9", "model.seq_len=17"],
        "parallel.tensor_chunks=8",
    ),
    "model.loss_chunk == 0 with pipeline.schedule zb-h1 or zb-v": (
        ["model.loss_chunk=64", "pipeline.schedule=zb-h1", "parallel.pipeline=2"],
        "model.loss_chunk=0",
    ),
    "model.layers >= parallel.pipeline * pipeline.chunks": (
        ["parallel.pipeline=4", "model.layers=7", "pipeline.schedule=interleaved"],
        "model.layers=8",
    ),
    "pipeline.chunks >= 2 with pipeline.schedule interleaved": (
        ["pipeline.schedule=interleaved", "pipeline.chunks=1"],
        "pipeline.chunks=2",
    ),
    "schedule.points given, in the order of updates, with schedule.decay piecewise, and only then": (
        ["schedule.decay=piecewise"],
        "schedule.points=[[0, 1.0], [9, 0.5]]",
    ),
    "one optimizer other than muon in optimizer.name and optimizer.groups "
    "with zero.offload.delayed, or zero.offload.optimizer nvme": (
        ["optimizer.name=muon", "zero.offload.optimizer=cpu", "zero.offload.delayed=true"],
        "zero.offload.delayed=false",
    ),
    "schedule.min_lr <= optimizer.lr": (["schedule.min_lr=0.1"], "optimizer.lr=0.1"),
    "observe.profile <= run.steps": (["observe.profile=11", "run.steps=10"], "run.steps=11"),
    "zero.stage >= 1 with zero.shard_ranks": (["zero.shard_ranks=2", "zero.stage=0"], "zero.stage=1"),
    "zero.stage == 3 and zero.shard_ranks == null with zero.secondary_ranks": (
        ["zero.secondary_ranks=2", "zero.stage=2"],
        "zero.stage=3",
    ),
    "zero.offload.path given with nvme in zero.offload.optimizer, zero.offload.parameters or memory.offload": (
        ["zero.offload.optimizer=nvme"],
        "zero.offload.path=here",
    ),
    "data.train == null with data.sources": (["data.train=a", "data.sources=[{path: a}]"], "data.train=null"),
    "names of data.sources differ": (["data.sources=[{path: a}, {path: b/a}]"], "data.sources=null"),
    "names of data.validation differ": (
        ["data.sources=[{path: a}]", "data.validation=[{path: b/a}]", "data.valid=0.1"],
        "data.valid=null",
    ),
    "smallest whole weights of data.sources sum to at most 1,000,000": (
        ["data.sources=[{path: a, weight: 1000000}, {path: b}]"],
        "data.sources=[{path: a, weight: 999999}, {path: b}]",
    ),
    "data.sources given if a stage gives data.sources": (
        ["stages=[{until_step: 5, data: {sources: [{path: a}]}}]"],
        "data.sources=[{path: a}]",
    ),
    "stages end by run.steps": (["stages=[{until_step: 5}]", "run.steps=4"], "run.steps=5"),
    "model.position rotary with another model.seq_len in stages": (
        ["stages=[{until_step: 5, model: {seq_len: 512}}]"],
        "model.position=rotary",
    ),
    "a name of data.sources has one path in all stages": (
        ["data.sources=[{path: a}]", "stages=[{until_step: 5, data: {sources: [{path: b/a}]}}]"],
        "data.sources=[{path: b/a}]",
    ),
    "each of stages has until_step or until_tokens": (
        ["data.sources=[{path: a}]", "stages=[{until_step: 5, until_tokens: 7}]"],
        "stages=[{until_tokens: 7}]",
    ),
    "each of stages ends after the one before": (
        ["data.sources=[{path: a}]", "stages=[{until_step: 5}, {until_tokens: 40960}]"],
        "batch.global=1",
    ),
    "checkpoint.load == all with checkpoint.resume none": (["checkpoint.load=weights"], "checkpoint.resume=runs/some"),
}
ROPES = [
    ("{kind: ntk, alpha: 4, share: 0.04}", "{kind: ntk, alpha: 4, share: 0.07}", "kind ntk needs 4 channels that turn"),
    ("{kind: yarn, factor: 4, original: 8, theta: 1}", "{kind: yarn, factor: 4, original: 8}", "needs theta > 1"),
    ("{kind: llama3, factor: 8, original: 8, high: 1}", "{kind: llama3, factor: 8, original: 8}", "needs low < high"),
    (
        "{kind: yarn, factor: 4, original: 8, mscale: 1}",
        "{kind: yarn, factor: 4, original: 8, mscale: 1, mscale_all: 1}",
        "needs mscale and mscale_all together",
    ),
    (
        "{kind: longrope, factor: 4, original: 1, short: [1], long: [1], share: 0.04}",
        "{kind: longrope, factor: 4, original: 2, short: [1], long: [1], share: 0.04}",
        "needs original > 1",
    ),
]


@pytest.mark.parametrize(("wrong", "right", "text"), ROPES)
def test_numbers_of_rotary_positions_that_compute_nothing(wrong: str, right: str, text: str, tmp_path: Path) -> None:
    file = str(tmp_path / "c.yaml")
    Path(file).write_text("{}\n")
    load(file, ["model.position=rotary", f"model.layer_kinds={{all: {{rope: {right}}}}}"])
    with pytest.raises(FaultList, match=text):
        load(file, ["model.position=rotary", f"model.layer_kinds={{all: {{rope: {wrong}}}}}"])


# The same for exclusions: one config for each (option, value that needs something).
EXCLUDED: dict[tuple[str, object], tuple[list[str], str]] = {
    **{
        ("pipeline.schedule", schedule): ([f"pipeline.schedule={schedule}", "pipeline.chunks=2"], "pipeline.chunks=1")
        for schedule in ("gpipe", "1f1b", "zb-h1")
    },
    ("pipeline.schedule", "zb-v"): (["pipeline.schedule=zb-v", "pipeline.chunks=3"], "pipeline.chunks=2"),
    **{
        ("zero.offload.optimizer", place): (
            [f"zero.offload.optimizer={place}", "zero.stage=0", "zero.offload.path=here"],
            "zero.stage=1",
        )
        for place in ("cpu", "nvme")
    },
    **{
        ("zero.offload.parameters", place): (
            [f"zero.offload.parameters={place}", "zero.stage=2", "zero.offload.path=here"],
            "zero.stage=3",
        )
        for place in ("cpu", "nvme")
    },
    ("zero.offload.delayed", True): (["zero.offload.delayed=true"], "zero.offload.optimizer=cpu"),
    ("zero.quantize.parameters", "int8"): (["zero.quantize.parameters=int8", "zero.stage=2"], "zero.stage=3"),
    **{
        ("zero.quantize.gradients", bits): ([f"zero.quantize.gradients={bits}", "zero.stage=0"], "zero.stage=1")
        for bits in ("int8", "int4")
    },
    ("zero.quantize.error_feedback", True): (["zero.quantize.error_feedback=true"], "zero.quantize.gradients=int8"),
    ("zero.reduce_dtype", "bf16"): (["zero.reduce_dtype=bf16", "precision.dtype=fp16"], "precision.dtype=bf16"),
    ("zero.reduce_dtype", "fp32"): (["zero.reduce_dtype=fp32", "precision.dtype=fp64"], "precision.dtype=fp16"),
    ("precision.masters", "none"): (["precision.masters=none"], "precision.dtype=bf16"),
    ("optimizer.average.kind", "ema"): (
        ["optimizer.average.kind=ema", "zero.offload.optimizer=nvme", "zero.offload.path=here"],
        "zero.offload.optimizer=cpu",
    ),
    ("optimizer.average.for_validation", True): (
        ["optimizer.average.for_validation=true"],
        "optimizer.average.kind=ema",
    ),
    ("memory.partition", True): (["memory.partition=true"], "memory.recompute=full"),
    **{
        ("memory.offload", place): (
            [f"memory.offload={place}", "memory.recompute=full", "zero.offload.path=here"],
            "memory.partition=true",
        )
        for place in ("cpu", "nvme")
    },
    ("memory.cuda_graphs", True): (["memory.cuda_graphs=true"], "memory.recompute=full"),
    ("data.pack", True): (["data.pack=true"], "data.mask_eod=true"),
}
GRAPHS = ["memory.cuda_graphs=true", "memory.recompute=full"]
# Options that need more than one other: the second and later ones.
ALSO = [
    (GRAPHS, "parallel.tensor=2", "parallel.tensor=1"),
    (GRAPHS, "model.dropout=0.1", "model.dropout=0"),
    (GRAPHS, "data.mask_eod=true", "data.mask_eod=false"),
    (GRAPHS, "parallel.pipeline=2", "parallel.pipeline=1"),
    (GRAPHS, "pipeline.schedule=zb-h1", "pipeline.schedule=1f1b"),
    (["precision.masters=none", "precision.dtype=bf16"], "optimizer.average.kind=ema", "optimizer.average.kind=none"),
    (["zero.quantize.gradients=int8", "zero.stage=1"], "zero.reduce_dtype=bf16", "zero.reduce_dtype=null"),
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "c.yaml").touch()
    return str(tmp_path / "c.yaml")


def test_tables_name_real_options_and_values():
    known = set(option_keys())
    assert {option for relation in RELATIONS for option in relation.options} <= known
    assert {option for row in EXCLUSIONS for option in (row.option, row.other)} <= known
    for row in (*RELATIONS, *EXCLUSIONS):
        assert row.do if hasattr(row, "do") else row.reason


def test_cases_below_cover_the_tables():
    assert set(BREAKS) == {relation.equation for relation in RELATIONS}
    assert set(EXCLUDED) == {(row.option, value) for row in EXCLUSIONS for value in row.values}


@pytest.mark.parametrize("equation", BREAKS)
def test_relation_is_broken_alone(file: str, equation: str):
    breaking, mended = BREAKS[equation]
    with pytest.raises(FaultList) as caught:
        load(file, breaking)
    (error,) = caught.value.errors
    assert error.code == 106 and f"{equation} is broken: " in str(error)
    load(file, [*breaking, mended])


@pytest.mark.parametrize(("options", "breaking", "mended"), ALSO)
def test_each_exclusion_of_an_option_is_broken_alone(file: str, options: list[str], breaking: str, mended: str):
    with pytest.raises(FaultList) as caught:
        load(file, [*options, breaking])
    (error,) = caught.value.errors
    assert error.code == 107 and breaking.partition("=")[0] in str(error)
    load(file, [*options, mended])


@pytest.mark.parametrize(("option", "value"), EXCLUDED)
def test_exclusion_is_broken_alone(file: str, option: str, value: object):
    breaking, mended = EXCLUDED[option, value]
    with pytest.raises(FaultList) as caught:
        load(file, breaking)
    (error,) = caught.value.errors
    assert error.code == 107 and f"command line: {option} {str(value).lower()} with " in str(error)
    load(file, [*breaking, mended])
