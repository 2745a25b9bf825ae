"""Map names and layouts of transformers' GPT-2 and Llama to ours, in both directions.

A link says which of their tensors one of our parameters is made of, and how. Ours: row weights are [in, out], column
weights [out, in]; the rows of qkv are grouped by key-value head: for each group its query heads, its key, its value.
Theirs: GPT-2's Conv1D weights are [in, out] and its qkv is all queries, all keys, all values; Llama's are [out, in] and
separate. A tied head has no tensor of its own on either side.

Source: transformers, models/gpt2/modeling_gpt2.py and models/llama/modeling_llama.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from megazero.base.errors import UserError

EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}  # and a head of its own
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Heads:
    """The numbers that the order of qkv's rows depends on."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Link:
    """A link between one of our parameters and the tensors of transformers that it is made of.

    Attributes:
        ours: the name of our parameter.
        theirs: the names of their tensors.
        to_ours, to_theirs: convert from the ones to the other.
    """

    ours: str
    theirs: tuple[str, ...]
    to_ours: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    to_theirs: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)


def grouped(qkv: Sequence[Tensor], heads: Heads) -> Tensor:
    """Return the rows of three projections [heads d, ...] as the rows of one, by key-value head."""
    per_group = heads.heads // heads.kv_heads
    shapes = [(heads.kv_heads, rows, heads.head_dim, *qkv[0].shape[1:]) for rows in (per_group, 1, 1)]
    parts = [part.reshape(shape) for part, shape in zip(qkv, shapes, strict=True)]
    return torch.cat(parts, dim=1).reshape(-1, *qkv[0].shape[1:])


def apart(rows: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of grouped rows: the inverse of `grouped`."""
    per_group = heads.heads // heads.kv_heads
    groups = rows.reshape(heads.kv_heads, per_group + 2, heads.head_dim, *rows.shape[1:])
    parts = groups.split([per_group, 1, 1], dim=1)
    q, k, v = (part.reshape(-1, *rows.shape[1:]) for part in parts)
    return q, k, v


def links(model: Mapping[str, Any]) -> list[Link]:
    """Return the link of every parameter of a model.

    Args:
        model: the config's model section, resolved.

    Raises:
        UserError: 415, transformers has no such model.
    """
    heads = Heads(model["heads"], model["kv_heads"], model["hidden"] // model["heads"])
    flavour = flavour_of(model)
    found = list(_gpt2(model["layers"], heads) if flavour == "gpt2" else _llama(model["layers"], heads))
    found.append(Link("embedding.tokens.weight", (EMBEDDING[flavour],)))
    if not model["tie_embeddings"]:
        found.append(Link("head.weight", (HEAD,)))
    return found


def flavour_of(model: Mapping[str, Any]) -> str:
    """Return "gpt2" or "llama". Raises UserError 415: neither."""
    kind = (model["position"], model["norm"], model["activation"])
    if kind == ("learned", "layernorm", "gelu") and model["kv_heads"] == model["heads"]:
        return "gpt2"
    if kind == ("rotary", "rmsnorm", "swiglu"):
        return "llama"
    what = "transformers has no model with position {}, norm {}, activation {}".format(*kind)
    what += f", {model['heads']} heads and {model['kv_heads']} key-value heads"
    raise UserError(415, what, "learned + layernorm + gelu is GPT-2, rotary + rmsnorm + swiglu is Llama")


def _turned(ours: str, theirs: str) -> Link:
    return Link(ours, (theirs,), lambda t: t[0].T, lambda t: (t.T,))


def _gpt2(layers: int, heads: Heads) -> Iterator[Link]:
    def qkv(ours: str, theirs: str) -> Link:  # t() turns a weight, and leaves a bias as it is
        return Link(
            ours, (theirs,), lambda t: grouped(t[0].t().chunk(3), heads), lambda t: (torch.cat(apart(t, heads)).t(),)
        )

    yield Link("embedding.positions.weight", ("transformer.wpe.weight",))
    for part in ("weight", "bias"):
        yield Link(f"head.norm.{part}", (f"transformer.ln_f.{part}",))
    for i in range(layers):
        old, new = f"transformer.h.{i}.", f"blocks.{i}."
        for part in ("weight", "bias"):
            yield Link(f"{new}attention_norm.{part}", (f"{old}ln_1.{part}",))
            yield Link(f"{new}mlp_norm.{part}", (f"{old}ln_2.{part}",))
            yield Link(f"{new}attention.out.{part}", (f"{old}attn.c_proj.{part}",))
            yield Link(f"{new}mlp.down.{part}", (f"{old}mlp.c_proj.{part}",))
            yield qkv(f"{new}attention.qkv.{part}", f"{old}attn.c_attn.{part}")
        yield _turned(f"{new}mlp.up.weight", f"{old}mlp.c_fc.weight")
        yield Link(f"{new}mlp.up_bias", (f"{old}mlp.c_fc.bias",))


def _llama(layers: int, heads: Heads) -> Iterator[Link]:
    yield Link("head.norm.weight", ("model.norm.weight",))
    for i in range(layers):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        yield Link(f"{new}attention_norm.weight", (f"{old}input_layernorm.weight",))
        yield Link(f"{new}mlp_norm.weight", (f"{old}post_attention_layernorm.weight",))
        names = tuple(f"{old}self_attn.{part}_proj.weight" for part in "qkv")
        yield Link(f"{new}attention.qkv.weight", names, lambda t: grouped(t, heads), lambda t: apart(t, heads))
        yield _turned(f"{new}attention.out.weight", f"{old}self_attn.o_proj.weight")
        yield Link(f"{new}mlp.gate.weight", (f"{old}mlp.gate_proj.weight",))
        yield Link(f"{new}mlp.up.weight", (f"{old}mlp.up_proj.weight",))
        yield _turned(f"{new}mlp.down.weight", f"{old}mlp.down_proj.weight")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that transformers has to know: what begins a text, ends it, fills a batch. None: there is none.

    They are always written, None as null: what transformers takes otherwise are ids of published vocabularies (50256 of
    GPT-2, 1 and 2 of Llama), which mean something else in another vocabulary, or nothing.
    """

    begin: int | None = None
    end: int | None = None
    pad: int | None = None


def config_to_theirs(model: Mapping[str, Any], dtype: str, tokens: SpecialTokens) -> dict[str, Any]:
    """Return their config.json of a model section."""
    common = {"vocab_size": model["vocab"], "tie_word_embeddings": model["tie_embeddings"], "torch_dtype": dtype}
    common |= {"bos_token_id": tokens.begin, "eos_token_id": tokens.end, "pad_token_id": tokens.pad}
    if flavour_of(model) == "gpt2":
        return common | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",  # the tanh form
            "n_layer": model["layers"],
            "n_embd": model["hidden"],
            "n_head": model["heads"],
            "n_inner": model["ffn"],
            "n_positions": model["seq_len"],
            "layer_norm_epsilon": model["norm_eps"],
            "embd_pdrop": model["dropout"],
            "resid_pdrop": model["dropout"],
            "attn_pdrop": 0.0,
        }
    return common | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": model["layers"],
        "hidden_size": model["hidden"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"],
        "head_dim": model["hidden"] // model["heads"],
        "intermediate_size": model["ffn"],
        "max_position_embeddings": model["seq_len"],
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
    }


# What our models do; another value of theirs would be another function. Absent is what transformers takes by default.
_FIXED = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
    "llama": {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    },
}


_ELSEWHERE = "train transformers' own class with megazero.shard"
Size = Annotated[int, Field(ge=1, lt=2**31)]


class _Theirs(BaseModel):
    """The fields that are read of a config.json, by their names; the rest is left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Gpt2(_Theirs):
    n_layer: Size
    n_embd: Size
    n_head: Size
    n_inner: Size | None = None
    vocab_size: Size
    n_positions: Size
    resid_pdrop: Annotated[float, Field(ge=0, lt=1)] = 0.1
    tie_word_embeddings: bool = True
    layer_norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5


class _Rope(_Theirs):
    rope_theta: Annotated[float, Field(ge=1)] | None = None


class _Llama(_Theirs):
    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    tie_word_embeddings: bool = False
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    rope_theta: Annotated[float, Field(ge=1)] | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: Annotated[_Rope | None, BeforeValidator(lambda found: found or None)] = None  # the older name


def config_from_theirs(theirs: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return our model section of their config.json.

    Args:
        where: the file.

    Raises:
        UserError: 415, a model or an option of a model that is none of ours, or a value that is none.
    """
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in _FIXED:
        do = f"import a model of gpt2 or llama, or {_ELSEWHERE}"
        raise UserError(415, f"model_type {kind!r:.40} has no option here", do, where=where)
    if theirs.get("quantization_config"):
        raise UserError(415, "quantization_config: quantised weights", "give the model before that", where=where)
    for option, allowed in _FIXED[kind].items():
        if theirs.get(option) not in allowed:
            what = (
                f"{option} {theirs[option]!s:.60}: our models have {allowed[0]}, the weights would be another function"
            )
            raise UserError(
                415, what, f"import a {kind} model with {option} {allowed[0]}, or {_ELSEWHERE}", where=where
            )
    _require_plain_angles(theirs, where)
    try:
        return _gpt2_section(_Gpt2(**theirs)) if kind == "gpt2" else _llama_section(_Llama(**theirs), where)
    except ValidationError as error:
        fault = error.errors()[0]
        what = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        what += "" if fault["type"] == "missing" else f", got {fault['input']!r:.40}"
        raise UserError(415, what, "give a config.json as transformers writes it", where=where) from None


def _require_plain_angles(theirs: Mapping[str, Any], where: Path) -> None:
    """Refuse rotary angles that are scaled. Raises UserError 415 with the field."""
    for field in ("rope_scaling", "rope_parameters"):
        found = theirs.get(field)
        kinds = {key: found.get(key) for key in ("rope_type", "type")} if isinstance(found, dict) else {}
        for key, kind in kinds.items():
            if kind not in ("default", None):
                what = f"{field}.{key} {kind!r:.40}: no option here scales rotary angles"
                raise UserError(415, what, f"import a model with {key} 'default', or {_ELSEWHERE}", where=where)


def _gpt2_section(theirs: _Gpt2) -> dict[str, Any]:
    return {
        "layers": theirs.n_layer,
        "hidden": theirs.n_embd,
        "heads": theirs.n_head,
        "kv_heads": theirs.n_head,
        "ffn": theirs.n_inner or 4 * theirs.n_embd,
        "vocab": theirs.vocab_size,
        "seq_len": theirs.n_positions,
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "dropout": theirs.resid_pdrop,
        "tie_embeddings": theirs.tie_word_embeddings,
        "norm_eps": theirs.layer_norm_epsilon,
        "rope_theta": 10000.0,  # of no use to it
    }


def _llama_section(theirs: _Llama, where: Path) -> dict[str, Any]:
    heads = theirs.num_attention_heads
    if theirs.head_dim is not None and theirs.head_dim * heads != theirs.hidden_size:
        what = f"head_dim {theirs.head_dim}: our models have hidden_size / num_attention_heads, "
        what += f"{theirs.hidden_size} / {heads}"
        raise UserError(415, what, f"import a model with that, or {_ELSEWHERE}", where=where)
    # As transformers reads them: the older field before the newer one, and the base in it before the one next to it.
    rope = theirs.rope_scaling or theirs.rope_parameters or _Rope()
    return {
        "layers": theirs.num_hidden_layers,
        "hidden": theirs.hidden_size,
        "heads": heads,
        "kv_heads": theirs.num_key_value_heads or heads,
        "ffn": theirs.intermediate_size,
        "vocab": theirs.vocab_size,
        "seq_len": theirs.max_position_embeddings,
        "position": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "dropout": 0.0,
        "tie_embeddings": theirs.tie_word_embeddings,
        "norm_eps": theirs.rms_norm_eps,
        "rope_theta": float(rope.rope_theta or theirs.rope_theta or 10000.0),
    }


# What files of theirs hold beside the parameters: masks and angles that the model makes itself, and a tied head.
_NO_PARAMETERS = {
    "gpt2": re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),
    "llama": re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
}


def is_no_parameter(name: str, model: Mapping[str, Any]) -> bool:
    """Return whether a tensor of theirs can be left out without changing what the model computes."""
    tied_head = model["tie_embeddings"] and name == HEAD
    return tied_head or _NO_PARAMETERS[flavour_of(model)].fullmatch(name) is not None
