"""Weights (or gradients) of transformers' GPT-2 and Llama under our names and layouts.

Ours: row weights are [in, out], column weights [out, in]; the rows of qkv are grouped by key-value head: for each
group its query heads, its key, its value.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megazero.model.transformer import Shape


def from_gpt2(theirs: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """transformers' Conv1D weights are [in, out]."""
    ours = {
        "embedding.tokens.weight": theirs["transformer.wte.weight"],
        "embedding.positions.weight": theirs["transformer.wpe.weight"],
        "head.norm.weight": theirs["transformer.ln_f.weight"],
        "head.norm.bias": theirs["transformer.ln_f.bias"],
    }
    for i in range(shape.layers):
        old, new = f"transformer.h.{i}.", f"blocks.{i}."
        for part in ("weight", "bias"):
            ours[f"{new}attention_norm.{part}"] = theirs[f"{old}ln_1.{part}"]
            ours[f"{new}mlp_norm.{part}"] = theirs[f"{old}ln_2.{part}"]
            ours[f"{new}attention.out.{part}"] = theirs[f"{old}attn.c_proj.{part}"]
            ours[f"{new}mlp.down.{part}"] = theirs[f"{old}mlp.c_proj.{part}"]
            qkv = theirs[f"{old}attn.c_attn.{part}"].T if part == "weight" else theirs[f"{old}attn.c_attn.{part}"]
            ours[f"{new}attention.qkv.{part}"] = grouped(*qkv.chunk(3), shape)
        ours[f"{new}mlp.up.weight"] = theirs[f"{old}mlp.c_fc.weight"].T
        ours[f"{new}mlp.up_bias"] = theirs[f"{old}mlp.c_fc.bias"]
    return ours


def from_llama(theirs: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """transformers' Linear weights are [out, in]."""
    ours = {
        "embedding.tokens.weight": theirs["model.embed_tokens.weight"],
        "head.norm.weight": theirs["model.norm.weight"],
    }
    if not shape.tie_embeddings:
        ours["head.weight"] = theirs["lm_head.weight"]
    for i in range(shape.layers):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        ours[f"{new}attention_norm.weight"] = theirs[f"{old}input_layernorm.weight"]
        ours[f"{new}mlp_norm.weight"] = theirs[f"{old}post_attention_layernorm.weight"]
        q, k, v = (theirs[f"{old}self_attn.{part}_proj.weight"] for part in "qkv")
        ours[f"{new}attention.qkv.weight"] = grouped(q, k, v, shape)
        ours[f"{new}attention.out.weight"] = theirs[f"{old}self_attn.o_proj.weight"].T
        ours[f"{new}mlp.gate.weight"] = theirs[f"{old}mlp.gate_proj.weight"]
        ours[f"{new}mlp.up.weight"] = theirs[f"{old}mlp.up_proj.weight"]
        ours[f"{new}mlp.down.weight"] = theirs[f"{old}mlp.down_proj.weight"].T
    return ours


def grouped(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """Rows of three projections [heads d, ...] as the rows of one, by key-value head."""
    head_dim, per_group = shape.hidden // shape.heads, shape.heads // shape.kv_heads
    parts = []
    for g in range(shape.kv_heads):
        parts.append(q[g * per_group * head_dim : (g + 1) * per_group * head_dim])
        parts += [k[g * head_dim : (g + 1) * head_dim], v[g * head_dim : (g + 1) * head_dim]]
    return torch.cat(parts)
