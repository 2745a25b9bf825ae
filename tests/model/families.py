"""Families of models as sets of options, next to transformers' own models.

transformers computes norms, angles and softmax in fp32, whatever the model's dtype. For the fp64 comparison its module
gets a `torch` whose float32 is float64.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megazero.plan.model import Kind, Rope, Shape
from tests.model.small import LLAMA

BASE = replace(LLAMA, layers=4, seq_len=16, vocab=96, norm_eps=1e-5)
PRE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
SANDWICH = {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **POST}
QK = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
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
        norms: our norms of a block, with their names there.
        order: turns the rows of a head (or a norm of heads) from their order into ours.
    """

    module: str
    name: str
    ours: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=lambda: PRE)
    interleaved: bool = False

    @property
    def shape(self) -> Shape:
        return replace(BASE, **self.ours)

    @property
    def order(self) -> list[int]:
        size, rope = self.shape.head_dim, next((kind.rope for kind in self.shape.kinds if kind.rope), None)
        turning = int(size * (1.0 if rope is None else rope.share))
        rows, half = list(range(size)), (size - turning) // 2
        if self.interleaved:
            rows[:turning] = [*range(0, turning, 2), *range(1, turning, 2)]
        first, second, rest = rows[: turning // 2], rows[turning // 2 : turning], rows[turning:]
        return [*first, *rest[:half], *second, *rest[half:]]


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
    "qwen3": Family("qwen3", "Qwen3", {"qk_norm": "head", "head_size": 16}, norms=PRE | QK),
    "olmo2": Family("olmo2", "Olmo2", {"norm_place": "post", "qk_norm": "full", "norm_cast": "after"}, norms=POST | QK),
    "olmo3": Family(
        *("olmo3", "Olmo3"),
        kinds(Kind(5), Kind(), norm_place="post", qk_norm="full", norm_cast="after"),
        TYPES | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in SLIDING}},
        POST | QK,
    ),
    "smollm3": Family("smollm3", "SmolLM3", kinds(FULL, FULL, FULL, STILL), {"use_sliding_window": False}),
    "exaone4": Family(
        *("exaone4", "Exaone4"),
        kinds(LOCAL, STILL, norm_place="post", qk_norm="head"),
        TYPES | {"sliding_window_pattern": 2},
        POST | QK,
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
        SANDWICH,
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
        SANDWICH | QK,
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
        {"attention_norm": "input_layernorm"},
        interleaved=True,
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


class _Wide:
    """torch with float64 in place of float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def widened(family: str) -> Iterator[None]:
    names = (f"transformers.models.{family}.modeling_{family}", "transformers.modeling_rope_utils")
    modules = [importlib.import_module(name) for name in names]
    narrow = torch.Tensor.float
    for module in modules:
        vars(module)["torch"] = _Wide()
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        for module in modules:
            vars(module)["torch"] = torch
        torch.Tensor.float = narrow  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


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


def under_our_names(family: Family, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or gradients, as ours."""
    if family.module == "gpt_neox":
        return _of_neox(family, theirs)
    shape, found, order = family.shape, {}, family.order
    found["embedding.tokens.weight"] = theirs["model.embed_tokens.weight"]
    size, groups = shape.head_dim, shape.kv_heads

    def heads(x: Tensor, *, turned: bool) -> Tensor:
        x = x.unflatten(0, (groups, -1, size))
        return x[:, :, order] if turned else x

    for i in range(shape.layers):
        ours, their = f"blocks.{i}", f"model.layers.{i}"
        names = {"up": "c_fc", "down": "c_proj"} if family.module == "starcoder2" else {}
        for part in ("weight", "bias"):
            if f"{their}.self_attn.q_proj.{part}" in theirs:
                q, k, v = (theirs[f"{their}.self_attn.{each}_proj.{part}"] for each in "qkv")
                parts = heads(q, turned=True), heads(k, turned=True), heads(v, turned=False)
                found[f"{ours}.attention.qkv.{part}"] = torch.cat(parts, dim=1).flatten(0, 2)
            if (out := theirs.get(f"{their}.self_attn.o_proj.{part}")) is not None:
                found[f"{ours}.attention.out.{part}"] = out.T if part == "weight" else out
            for each in ("gate", "up", "down"):
                value = theirs.get(f"{their}.mlp.{names.get(each, f'{each}_proj')}.{part}")
                name = "up_bias" if (each, part) == ("up", "bias") and not shape.gated else f"{each}.{part}"
                if value is not None:
                    found[f"{ours}.mlp.{name}"] = value.T if (each, part) == ("down", "weight") else value
            for mine, name in family.norms.items():
                if (value := theirs.get(f"{their}.{name}.{part}")) is not None:
                    found[f"{ours}.{mine}.{part}"] = value[order] if len(value) == size else value
    for part in ("weight", "bias"):
        if (value := theirs.get(f"model.norm.{part}")) is not None:
            found[f"head.norm.{part}"] = value
    if not shape.tie_embeddings:
        found["head.weight"] = theirs["lm_head.weight"]
    return found


def _of_neox(family: Family, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shape, order = family.shape, family.order
    found = {"embedding.tokens.weight": theirs["gpt_neox.embed_in.weight"], "head.weight": theirs["lm_head.weight"]}
    for part in ("weight", "bias"):
        found[f"head.norm.{part}"] = theirs[f"gpt_neox.final_layer_norm.{part}"]
        for i in range(shape.layers):
            ours, their = f"blocks.{i}", f"gpt_neox.layers.{i}"
            rows = theirs[f"{their}.attention.query_key_value.{part}"].unflatten(0, (shape.heads, 3, -1))
            turned = torch.cat((rows[:, :2, order], rows[:, 2:]), dim=1)
            found[f"{ours}.attention.qkv.{part}"] = turned.flatten(0, 2)
            pairs = {"attention.out": "attention.dense", "mlp.down": "mlp.dense_4h_to_h"}
            for mine, name in pairs.items():
                value = theirs[f"{their}.{name}.{part}"]
                found[f"{ours}.{mine}.{part}"] = value.T if part == "weight" else value
            found[f"{ours}.mlp.up{'.' if part == 'weight' else '_'}{part}"] = theirs[
                f"{their}.mlp.dense_h_to_4h.{part}"
            ]
            for mine, name in PRE.items():
                found[f"{ours}.{mine}.{part}"] = theirs[f"{their}.{name}.{part}"]
    return found
