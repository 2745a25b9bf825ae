"""Families of models as sets of options, next to transformers' own models."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import transformers
from torch import Tensor, nn

from megazero.comm.grid import Axis
from megazero.kernels.operations import REFERENCE
from megazero.model.transformer import Transformer
from megazero.plan.model import Kind, Rope, Shape
from megazero.tools.convert.families import families
from megazero.tools.convert.tensors import heads_of, links
from tests.model.small import LLAMA

BASE = replace(LLAMA, layers=4, seq_len=16, vocab=96, norm_eps=1e-5)
LOCAL, FULL, STILL = Kind(5), Kind(), Kind(rope=None)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8, "rope_theta": 500.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Family:
    """A family at a small size.

    Attributes:
        module: of transformers.models; `name` begins its classes' names.
        ours: options that differ from a Llama's.
        theirs: options of the config of transformers, besides sizes.
    """

    module: str
    name: str
    ours: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return replace(BASE, **self.ours)

    @property
    def kind(self) -> str:
        """The model_type in config.json."""
        return "gemma3_text" if self.module == "gemma3" else self.module

    def renamed(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return under_our_names(self.shape, self.kind, theirs)


def kinds(*kinds: Kind, **options: Any) -> dict[str, Any]:
    return {"kinds": kinds, **options}


SLIDING = ["sliding_attention", "full_attention"]
TYPES = {"layer_types": SLIDING * 2, "sliding_window": 5}
GEMMA: dict[str, Any] = {"norm_place": "sandwich", "norm_offset": 1, "norm_cast": "after", "activation": "geglu"}
GEMMA |= {"head_size": 16, "embedding_scale": 48**0.5, "tie_embeddings": True}
NEOX = {"norm": "layernorm", "residual": "parallel", "activation": "gelu_erf", "kv_heads": 4}
FAMILIES = {
    "llama-3.1": Family(
        *("llama", "Llama"),
        kinds(Kind(rope=Rope(500.0, kind="llama3", factor=8.0, original=8))),
        {"rope_parameters": LLAMA3},
    ),
    "llama-yarn": Family(
        *("llama", "Llama"), kinds(Kind(rope=Rope(kind="yarn", factor=4.0, original=8))), {"rope_parameters": YARN}
    ),
    "mistral": Family("mistral", "Mistral", kinds(LOCAL), {"sliding_window": 5}),
    "qwen2": Family("qwen2", "Qwen2", {"biases": frozenset({"qkv"})}),
    "qwen3": Family("qwen3", "Qwen3", {"qk_norm": "head", "head_size": 16}),
    "olmo2": Family("olmo2", "Olmo2", {"norm_place": "post", "qk_norm": "full", "norm_cast": "after"}),
    "olmo3": Family(
        *("olmo3", "Olmo3"),
        kinds(Kind(5), Kind(), norm_place="post", qk_norm="full", norm_cast="after"),
        TYPES | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in SLIDING}},
    ),
    "smollm3": Family("smollm3", "SmolLM3", kinds(FULL, FULL, FULL, STILL), {"use_sliding_window": False}),
    "exaone4": Family(
        *("exaone4", "Exaone4"),
        kinds(LOCAL, STILL, norm_place="post", qk_norm="head"),
        TYPES | {"sliding_window_pattern": 2},
    ),
    "seed-oss": Family(
        *("seed_oss", "SeedOss"),
        {"biases": frozenset({"qkv"}), "head_size": 16},
        {"attention_bias": True, "attention_out_bias": False},
    ),
    "granite": Family(
        *("granite", "Granite"),
        {"attention_scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.125},
        {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "gemma2": Family(
        *("gemma2", "Gemma2"),
        kinds(LOCAL, FULL, **GEMMA, attention_cap=3.0, logit_cap=2.0, attention_scale=1 / 3),
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 9, **TYPES},
    ),
    "gemma3": Family(
        *("gemma3", "Gemma3"),
        kinds(Kind(5, Rope(100.0)), Kind(None, Rope(7000.0)), **GEMMA, qk_norm="head"),
        {
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 7000.0},
            },
            **TYPES,
        },
    ),
    "nemotron": Family(
        *("nemotron", "Nemotron"),
        kinds(
            Kind(rope=Rope(share=0.5)), norm="layernorm", norm_offset=1, activation="relu2", biases=frozenset({"norm"})
        ),
        {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    "cohere2": Family(
        *("cohere2", "Cohere2"),
        kinds(
            *(LOCAL, STILL),
            norm="layernorm",
            biases=frozenset(),
            residual="parallel_shared",
            logit_scale=0.25,
            tie_embeddings=True,
        ),
        TYPES | {"logit_scale": 0.25, "layer_norm_eps": 1e-5},
    ),
    "starcoder2": Family(
        *("starcoder2", "Starcoder2"),
        kinds(LOCAL, norm="layernorm", activation="gelu", tie_embeddings=True),
        {
            "sliding_window": 5,
            "use_bias": True,
            "norm_epsilon": 1e-5,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
        },
    ),
    "gpt-neox": Family(
        *("gpt_neox", "GPTNeoX"),
        kinds(Kind(rope=Rope(share=0.25)), **NEOX, head_size=16, hidden=64),
        {"use_parallel_residual": True, "hidden_act": "gelu", "rope_parameters": {"rope_type": "default"}},
    ),
}


def their_model(family: Family) -> nn.Module:
    shape = family.shape
    neox = family.module == "gpt_neox"
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": 64,
        "tie_word_embeddings": shape.tie_embeddings,
        "attn_implementation": "eager",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if neox:
        sizes |= {"layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10000}
    else:
        sizes |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "rms_norm_eps": 1e-5}
        sizes |= {"rope_theta": 10000.0}
    suffix = "Text" if family.module == "gemma3" else ""
    config = getattr(transformers, f"{family.name}{suffix}Config")(**sizes | dict(family.theirs))
    return getattr(transformers, f"{family.name}ForCausalLM")(config)


def under_our_names(shape: Shape, kind: str, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' weights, or gradients, of a family, as an import makes ours of them."""
    family, model = families()[kind], Transformer(shape, seed=0, tensor=Axis("tensor"), sequence=False, ops=REFERENCE)
    heads, names = heads_of(shape, interleaved=family.interleaved), [name for name, _ in model.named_parameters()]
    live = {family.head if name == "lm_head.weight" else name: value for name, value in theirs.items()}  # not in files
    found = links(family.rows, heads, shape.layers, names)
    ours = [(link.ours, link.to_ours([live[name] for name in link.theirs])) for link in found]
    return {name: value for names, values in ours for name, value in zip(names, values, strict=True)}
