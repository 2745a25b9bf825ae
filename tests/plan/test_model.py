"""Parameter counts and FLOPs against published models."""

from collections import Counter
from dataclasses import MISSING, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.builders.pipeline import model_shape
from megazero.config.schema import Config, Model, resolved
from megazero.plan.flops import flops_per_token, matmul_parameters
from megazero.plan.layers import parameters
from megazero.plan.model import Kind, Rope, Shape


def gpt(layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> Shape:
    return Shape(layers, hidden, heads, heads, 4 * hidden, vocab, seq_len)


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int) -> Shape:
    return Shape(
        layers, hidden, heads, kv_heads, ffn, vocab, seq_len, "rotary", "rmsnorm", "swiglu", tie_embeddings=False
    )


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (gpt(12, 768, 12, 50257, 1024), 124_439_808),  # GPT-2 small, as released
        (gpt(48, 1600, 25, 50257, 1024), 1_557_611_200),  # GPT-2 XL, as released
        (llama(32, 4096, 32, 8, 14336, 128256, 8192), 8_030_261_248),  # Llama 3 8B, as released
    ],
)
def test_published_parameter_counts(shape: Shape, published: int):
    assert parameters(shape) == published


gpt_shapes = st.builds(
    lambda layers, heads, head_dim, vocab, seq: gpt(layers, heads * head_dim, heads, vocab, seq),
    st.integers(1, 128),
    st.integers(1, 160),
    st.integers(1, 160),
    st.integers(1, 60000),
    st.integers(1, 8192),
)


@given(gpt_shapes)
def test_gpt_count_is_the_closed_formula(shape: Shape):
    L, h, V, s = shape.layers, shape.hidden, shape.vocab, shape.seq_len
    assert parameters(shape) == 12 * L * h**2 + 13 * L * h + (V + s) * h + 2 * h


@given(gpt_shapes)
def test_gpt_flops_are_the_papers_formula(shape: Shape):
    L, h, V, s = shape.layers, shape.hidden, shape.vocab, shape.seq_len
    assert flops_per_token(shape) == 72 * L * h**2 + 12 * L * s * h + 6 * V * h
    paper = 72 * L * h**2 * (1 + s / (6 * h) + V / (12 * h * L))  # arXiv 2205.05198, appendix A
    assert flops_per_token(shape) == pytest.approx(paper, rel=1e-12)


@given(gpt_shapes)
def test_matrix_products_use_all_but_biases_norms_positions_and_the_lookup(shape: Shape):
    small = shape.layers * 13 * shape.hidden + 2 * shape.hidden + shape.seq_len * shape.hidden
    assert parameters(shape) - small == matmul_parameters(shape)  # tied: the one table is counted as the head
    untied = Shape(**{**shape.__dict__, "tie_embeddings": False})
    assert matmul_parameters(untied) == matmul_parameters(shape)
    assert parameters(untied) - parameters(shape) == shape.vocab * shape.hidden


def test_grouped_heads_and_gate_by_hand():
    shape = llama(layers=1, hidden=8, heads=4, kv_heads=2, ffn=10, vocab=5, seq_len=3)
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10 + 2 * 8
    assert parameters(shape) == 5 * 8 + block + 8 + 5 * 8
    assert matmul_parameters(shape) == block - 2 * 8 + 5 * 8
    assert flops_per_token(shape) == 6 * matmul_parameters(shape) + 12 * 1 * 4 * 2 * 3


# arXiv 2205.05198, table 5: heads, hidden, layers, GPUs, global batch, seconds per iteration, MFU in percent (A100)
ITERATIONS = [
    ("22B", 64, 6144, 48, 8, 4, 1.10, 41.5),
    ("175B", 96, 12288, 96, 64, 64, 13.75, 51.4),
    ("530B", 128, 20480, 105, 280, 280, 37.83, 56.0),
    ("1T", 160, 25600, 128, 512, 512, 71.49, 56.3),
]


@pytest.mark.parametrize(("name", "heads", "hidden", "layers", "gpus", "batch", "seconds", "mfu"), ITERATIONS)
def test_published_iteration_times_give_the_published_mfu(name, heads, hidden, layers, gpus, batch, seconds, mfu):
    shape = gpt(layers, hidden, heads, 51200, 2048)
    ours = flops_per_token(shape) * batch * 2048 / seconds / gpus / 312e12
    # both columns are printed rounded: half a last digit of the percentage, half of the time's
    rounding = 0.05 + 100 * ours * 0.005 / seconds
    assert 100 * ours == pytest.approx(mfu, abs=rounding), name


def test_a_shape_s_fields_and_defaults_are_those_of_the_config() -> None:
    options = {name: option.default for name, option in Model.model_fields.items()}
    assert set(options) - {field.name for field in fields(Shape)} == {
        "loss_chunk",  # how the loss is computed, not what
        *("head_dim", "bias", "norm_bias", "softcap"),  # head_size, biases, attention_cap, logit_cap
        *("rope_theta", "layer_kinds", "layer_pattern"),  # kinds
    }
    defaults = {field.name: field.default for field in fields(Shape) if field.default is not MISSING}
    assert all(options[name] == value for name, value in defaults.items() if name in options)


def test_every_option_reaches_the_shape() -> None:
    """Of the options that have other names there."""
    rope = {"kind": "yarn", "factor": 2.0, "original": 64, "share": 0.5}
    kinds = {"local": {"window": 8}, "full": {"rope": rope}, "none": {"rope": None}}
    pattern = ("local", "full", "local", "none")
    given = {"head_dim": 24, "position": "rotary", "rope_theta": 500.0, "layer_kinds": kinds, "layer_pattern": pattern}
    given |= {"bias": {"qkv": False, "out": True}, "softcap": {"attention": 50.0, "logits": 30.0}, "layers": 6}
    shape = model_shape(resolved(Config.model_validate({"model": given})))
    local, full = Kind(8, Rope(500.0)), Kind(None, Rope(500.0, 0.5, "yarn", 2.0, 64))
    assert [shape.kind(i) for i in range(6)] == [local, full, local, Kind(None, None), local, full]
    assert (shape.head_dim, shape.width) == (24, 12 * 24)
    assert [shape.biased(place) for place in ("qkv", "out", "mlp")] == [False, True, True]
    assert (shape.attention_cap, shape.logit_cap) == (50.0, 30.0)


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 20))
def test_blocks_are_counted_by_kind(period: int, start: int, count: int) -> None:
    shape = Shape(40, 8, 1, 1, 8, 8, 64, position="rotary", kinds=tuple(Kind(1 + i % 4) for i in range(period)))
    blocks = range(start, start + count)
    assert shape.counted(blocks) == Counter(shape.kind(i) for i in blocks)
