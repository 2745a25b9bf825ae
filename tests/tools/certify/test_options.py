"""The certificate of models with options: the layouts are equal to one process, and each option's fault is found."""

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.builders.job import job_of
from megazero.tools.certify.certify import Certificate
from megazero.tools.certify.planted_options import OPTION_FAULTS
from megazero.tools.certify.planting import NOTHING, plant
from tests.tiny_run import TinyData
from tests.tools.certify.test_planting import SHAPE, check

ROTARY = ("model.position=rotary", "model.norm=rmsnorm", "model.tie_embeddings=false")
YARN = "{kind: yarn, factor: 4, original: 8, beta_fast: 1.5, beta_slow: 0.1}"
SETS = {
    "gemma": (
        *ROTARY,
        "model.layer_kinds={local: {window: 3, rope: {theta: 100}}, full: {rope: {kind: linear, factor: 4}}}",
        *("model.norm_place=sandwich", "model.norm_offset=1", "model.norm_cast=after", "model.activation=geglu"),
        *("model.head_dim=12", "model.embedding_scale=5.5", "model.softcap.attention=1", "model.softcap.logits=2"),
        *("model.qk_norm=head", "model.kv_heads=1"),
    ),
    "olmo": (
        *ROTARY,
        f"model.layer_kinds={{local: {{window: 5}}, full: {{rope: {YARN}}}}}",
        *("model.norm_place=post", "model.qk_norm=full", "model.z_loss=0.01", "model.activation=swiglu"),
        *("model.init_depth=false", "model.bias.qkv=true", "model.query_scale={beta: 0.5, original: 4}"),
    ),
    "neox": (
        *("model.position=rotary", "model.residual=parallel", "model.activation=gelu_erf", "model.bias.out=false"),
        *("model.layer_kinds={all: {rope: {share: 0.5}}}", "model.attention_scale=0.5", "model.norm_bias=false"),
    ),
    "granite": (
        *ROTARY,
        *("model.residual=parallel_shared", "model.residual_scale=0.3", "model.logit_scale=0.25"),
        *("model.activation=relu2", "model.layer_kinds={turned: {}, still: {rope: null}}", "model.qk_norm=head"),
        "model.qk_norm_at=after",
    ),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp64", marks=pytest.mark.full)])
def test_the_fault_of_each_option_is_found(tiny_data: TinyData, tmp_path: Path, name: str, dtype: str) -> None:
    config = tiny_data.load(tmp_path, *SHAPE, *SETS[name])
    job = job_of(config, 1)
    own = [fault.name for fault in OPTION_FAULTS if fault.needs(fault.layout(job))]
    found = list(plant(config, [NOTHING, *own], 2, dtypes=(dtype,), faults=OPTION_FAULTS))
    assert sorted(each.fault for each in found) == sorted([NOTHING, *own])
    check(found)


def test_every_fault_of_an_option_is_planted(tiny_data: TinyData, tmp_path: Path) -> None:
    jobs = [job_of(tiny_data.load(tmp_path, *SHAPE, *options), 1) for options in ((), *SETS.values())]
    never = [fault.name for fault in OPTION_FAULTS if not any(fault.needs(fault.layout(job)) for job in jobs)]
    assert never == ["not-swiglu"] or never == []


LAYOUTS = {
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2, "micro_batch": 1},
    "stage 3": {"data": 2, "stage": 3},
    "chunks": {"tensor": 2, "sequence": True, "tensor_chunks": 2},
    "selective": {"tensor": 2, "recompute": "selective"},
    "full": {"data": 2, "stage": 2, "recompute": "full"},
    "Pa": {"tensor": 2, "recompute": "full", "partition": True},
    "loss chunks": {"tensor": 2, "loss_chunk": 5},
    "zb-h1": {"pipeline": 2, "schedule": "zb-h1", "micro_batch": 1},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2, "micro_batch": 1},
    "four": {"tensor": 4, "sequence": True},
    "all": {"tensor": 2, "pipeline": 2, "data": 2, "stage": 1, "micro_batch": 1},
}
QUICK = [("gemma", "pipeline"), ("gemma", "four"), ("olmo", "sequence"), ("olmo", "selective")]
QUICK += [("neox", "Pa"), ("neox", "zb-h1"), ("granite", "stage 3"), ("granite", "sequence")]
PAIRS = [(name, layout) for name in SETS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.full) for pair in PAIRS]
)
def test_layouts_are_equal_to_one_process(tiny_data: TinyData, tmp_path: Path, name: str, layout: str) -> None:
    """With documents and five blocks, so that pipeline stages are unequal."""
    more = ("model.layers=5", "data.mask_eod=true", "batch.global=4", "batch.micro=2", "precision.dtype=fp64")
    certificate = Certificate(tiny_data.load(tmp_path, *SHAPE, *SETS[name], *more), 2)
    row = certificate.row(replace(certificate.alone, **LAYOUTS[layout]))  # type: ignore[arg-type]
    assert row.fault is None, row
