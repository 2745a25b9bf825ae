"""The configs in configs/: their names, and that each describes the model whose name it bears."""

from collections.abc import Mapping

import pytest

from megazero.builders.assemble import build_model
from megazero.builders.pipeline import model_shape
from megazero.config.file import CONFIGS, load
from megazero.config.flat import flatten
from megazero.plan.layers import parameters

# layers, hidden, vocabulary, sequence; sources in each file. The count is 12 L h^2 + 13 L h + (V + s) h + 2 h.
GPT: Mapping[str, tuple[int, int, int, int]] = {
    "tiny": (6, 320, 8192, 256),
    "gpt2_124m": (12, 768, 50257, 1024),
    "gpt2_1.5b": (48, 1600, 50257, 1024),
    "gpt13b": (62, 4096, 50257, 1024),
    "turing_nlg_17b": (78, 4256, 50257, 1024),
    "gpt100b": (125, 8192, 50257, 1024),
    "gpt170b": (212, 8192, 50257, 1024),
    "gpt1t": (128, 25600, 51200, 2048),
}
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_1.5b": 1_557_611_200,
    "llama8b": 8_030_261_248,
    "quickstart": 1_049_216,
    "sft": 134_515_008,
    # computed by transformers 5.23 on meta
    "qwen3_0.6b": 596_049_920,
    "gemma3_1b": 999_885_952,
    "gemma2_2b": 2_614_341_888,
    "starcoder2_3b": 3_030_371_328,
    "smollm3_3b": 3_075_098_624,
    "pythia_6.9b": 6_857_302_016,
    "mistral_7b": 7_248_023_552,
    "olmo2_7b": 7_298_617_344,
    "qwen2.5_7b": 7_615_616_512,
    "command_r7b": 8_028_033_024,
    "granite3_8b": 8_170_864_640,
    "qwen3_8b": 8_190_735_360,
    "glm4_9b": 9_400_279_040,
    "nemotron4_15b": 15_628_775_424,
    "olmo3_32b": 32_233_522_176,
    "qwen3_32b": 32_762_123_264,
    "seed_oss_36b": 36_151_104_512,
    "llama3_70b": 70_553_706_496,
}
NAMES = [*{**GPT, **PUBLISHED}]


def closed_count(name: str) -> int:
    L, h, V, s = GPT[name]
    return 12 * L * h**2 + 13 * L * h + (V + s) * h + 2 * h


def test_exactly_these_are_shipped():
    assert sorted(path.name for path in CONFIGS.glob("*.yaml")) == sorted(f"{name}.yaml" for name in NAMES)
    assert sorted(path.name for path in (CONFIGS / "over").iterdir()) == [
        *(f"c{i}.yaml" for i in range(1, 6)),
        "infinity.yaml",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_model_on_meta_has_the_published_size(name: str):
    config = load(name)
    declared = list(build_model(config).parameters())
    assert all(parameter.is_meta for parameter in declared)
    count = sum(parameter.numel() for parameter in declared)
    assert count == PUBLISHED.get(name, closed_count(name) if name in GPT else None)
    assert count == parameters(model_shape(config))
    if name in GPT:
        assert count == closed_count(name)
        m = config.model
        assert (m.layers, m.hidden, m.vocab, m.seq_len) == GPT[name]


@pytest.mark.parametrize("name", list(GPT))
def test_gpt_configs_leave_kv_heads_and_ffn_to_the_default(name: str):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert "kv_heads" not in text and "ffn" not in text
    values = flatten(load(name))
    assert values["model.kv_heads"] == values["model.heads"]
    assert values["model.ffn"] == 4 * values["model.hidden"]
