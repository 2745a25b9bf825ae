"""Map names, layouts and options of transformers' GPT-2 and Llama to ours, in both directions, by a table of families.

A row gives the tensors of transformers that make one of our parameters, and the conversion. Ours: row weights are
[in, out], column weights [out, in]; the rows of qkv are grouped by key-value head: for each group its query heads, its
key, its value. Theirs: GPT-2's Conv1D weights are [in, out] and its qkv is all queries, all keys, all values; Llama's
are [out, in] and separate. A tied head has no tensor of its own on either side.

Source: transformers, models/gpt2/modeling_gpt2.py and models/llama/modeling_llama.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from megazero.base.errors import UserError
from megazero.config.changes import FREE, row_of
from megazero.config.schema import Model

HEAD = "lm_head.weight"
_ELSEWHERE = "train transformers' own class with megazero.shard"


ROLES = ("bos", "eos", "pad")  # of special tokens


class Heads(NamedTuple):
    """The numbers that determine the row order of qkv: query heads per key-value head, key-value heads, head size."""

    per_group: int
    kv_heads: int
    head_dim: int


def grouped(heads: Heads, qkv: Sequence[Tensor]) -> Tensor:
    """Join three projections [heads d, ...] to one, with rows grouped by key-value head."""
    shapes = [(heads.kv_heads, rows, heads.head_dim, *qkv[0].shape[1:]) for rows in (heads.per_group, 1, 1)]
    parts = [part.reshape(shape) for part, shape in zip(qkv, shapes, strict=True)]
    return torch.cat(parts, dim=1).reshape(-1, *qkv[0].shape[1:])


def apart(heads: Heads, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split grouped rows into queries, keys and values: the inverse of `grouped`."""
    groups = rows.reshape(heads.kv_heads, heads.per_group + 2, heads.head_dim, *rows.shape[1:])
    parts = groups.split([heads.per_group, 1, 1], dim=1)
    q, k, v = (part.reshape(-1, *rows.shape[1:]) for part in parts)
    return q, k, v


class Way(NamedTuple):
    """A conversion, in both directions, between one of our parameters and the transformers tensors that make it."""

    to_ours: Callable[[Heads, Sequence[Tensor]], Tensor]
    to_theirs: Callable[[Heads, Tensor], Sequence[Tensor]]


_SAME = Way(lambda heads, theirs: theirs[0], lambda heads, ours: (ours,))
_TURNED = Way(lambda heads, theirs: theirs[0].T, lambda heads, ours: (ours.T,))
_GROUPED = Way(grouped, apart)
# For GPT-2: t() transposes a weight, and leaves a bias unchanged.
_GROUPED_TURNED = Way(
    lambda heads, theirs: grouped(heads, theirs[0].t().chunk(3)),
    lambda heads, ours: (torch.cat(apart(heads, ours)).t(),),
)


class Row(NamedTuple):
    """The names of a parameter: `{i}` is a layer's number, `{part}` stands for weight and bias, `{qkv}` for q, k, v."""

    ours: str
    theirs: str
    way: Way = _SAME


@dataclass(frozen=True)
class Family:
    """A family of transformers models.

    Attributes:
        name, architecture: as in config.json.
        options: options of our model section that all models of the family share.
        fields: field of config.json -> (our option, default; ...: required). The options' types check the values.
        fixed: field of config.json -> the values that our models support; others would be another function. The first
            one is written. None stands for an absent field, if the default of transformers is supported.
        rows: the parameters.
        embedding: transformers' name of the embedding.
        no_parameters: pattern of other tensors in their files: masks and angles, which the model computes itself.
    """

    name: str
    architecture: str
    options: Mapping[str, Any]
    fields: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    rows: tuple[Row, ...]
    embedding: str
    no_parameters: str


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {"position": "learned", "norm": "layernorm", "activation": "gelu"},
    {
        "n_layer": ("layers", ...),
        "n_embd": ("hidden", ...),
        "n_head": ("heads", ...),
        "n_inner": ("ffn", None),
        "vocab_size": ("vocab", ...),
        "n_positions": ("seq_len", ...),
        "resid_pdrop": ("dropout", 0.1),
        "tie_word_embeddings": ("tie_embeddings", True),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
    },
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),  # the tanh form
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
    (
        Row("embedding.positions.weight", "transformer.wpe.weight"),
        Row("head.norm.{part}", "transformer.ln_f.{part}"),
        Row("blocks.{i}.attention_norm.{part}", "transformer.h.{i}.ln_1.{part}"),
        Row("blocks.{i}.mlp_norm.{part}", "transformer.h.{i}.ln_2.{part}"),
        Row("blocks.{i}.attention.out.{part}", "transformer.h.{i}.attn.c_proj.{part}"),
        Row("blocks.{i}.mlp.down.{part}", "transformer.h.{i}.mlp.c_proj.{part}"),
        Row("blocks.{i}.attention.qkv.{part}", "transformer.h.{i}.attn.c_attn.{part}", _GROUPED_TURNED),
        Row("blocks.{i}.mlp.up.weight", "transformer.h.{i}.mlp.c_fc.weight", _TURNED),
        Row("blocks.{i}.mlp.up_bias", "transformer.h.{i}.mlp.c_fc.bias"),
    ),
    "transformer.wte.weight",
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu"},
    {
        "num_hidden_layers": ("layers", ...),
        "hidden_size": ("hidden", ...),
        "num_attention_heads": ("heads", ...),
        "num_key_value_heads": ("kv_heads", None),
        "intermediate_size": ("ffn", ...),
        "vocab_size": ("vocab", ...),
        "max_position_embeddings": ("seq_len", ...),
        "tie_word_embeddings": ("tie_embeddings", False),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "rope_theta": ("rope_theta", None),
    },
    {"hidden_act": ("silu", None), "attention_bias": (False, None), "mlp_bias": (False, None)},
    (
        Row("head.norm.weight", "model.norm.weight"),
        Row("blocks.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
        Row("blocks.{i}.mlp_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
        Row("blocks.{i}.attention.qkv.weight", "model.layers.{i}.self_attn.{qkv}_proj.weight", _GROUPED),
        Row("blocks.{i}.attention.out.weight", "model.layers.{i}.self_attn.o_proj.weight", _TURNED),
        Row("blocks.{i}.mlp.gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
        Row("blocks.{i}.mlp.up.weight", "model.layers.{i}.mlp.up_proj.weight"),
        Row("blocks.{i}.mlp.down.weight", "model.layers.{i}.mlp.down_proj.weight", _TURNED),
    ),
    "model.embed_tokens.weight",
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
FAMILIES = {family.name: family for family in (GPT2, LLAMA)}


_OF_TRAINING = {"init_std", "init_depth", "z_loss"}  # options that do not change what a trained model computes


def family_of(model: Mapping[str, Any]) -> Family:
    """Return the family of a model section. Raises UserError 415: no family has this model."""
    known = {name for one in FAMILIES.values() for name in (*one.options, *(ours for ours, _ in one.fields.values()))}
    known |= {name for name in Model.model_fields if row_of(f"model.{name}").on_resume == FREE} | _OF_TRAINING
    for name, default in Model().model_dump().items():
        if name not in known and (value := model.get(name, default)) != default:
            do = f"only models with {name} {default} can be imported and exported"
            raise UserError(415, f"model.{name} {value}: no supported family of transformers has it", do)
    for family in FAMILIES.values():
        queries = model["kv_heads"] == model["heads"] or "num_key_value_heads" in family.fields
        if queries and all(model[name] == value for name, value in family.options.items()):
            return family
    what = "transformers has no model with position {position}, norm {norm}, activation {activation}".format(**model)
    what += f", {model['heads']} heads and {model['kv_heads']} key-value heads"
    raise UserError(415, what, "learned + layernorm + gelu is GPT-2, rotary + rmsnorm + swiglu is Llama")


@dataclass(frozen=True)
class Link:
    """A link between one of our parameters and the transformers tensors that make it.

    Attributes:
        ours: the name of our parameter.
        theirs: the names of the transformers tensors.
        to_ours, to_theirs: convert their tensors to our parameter, and back.
    """

    ours: str
    theirs: tuple[str, ...]
    to_ours: Callable[[Sequence[Tensor]], Tensor]
    to_theirs: Callable[[Tensor], Sequence[Tensor]]


def links(model: Mapping[str, Any]) -> list[Link]:
    """Return a `Link` for every parameter of a model: the tensors of transformers that make it, and the conversion.

    Args:
        model: the config's model section, resolved.

    Raises:
        UserError: 415, transformers has no such model.
    """
    family, kv_heads = family_of(model), model["kv_heads"]
    heads = Heads(model["heads"] // kv_heads, kv_heads, model["hidden"] // model["heads"])
    rows = [*family.rows, Row("embedding.tokens.weight", family.embedding)]
    rows += [] if model["tie_embeddings"] else [Row("head.weight", HEAD)]
    found = []
    for row in rows:
        for i in range(model["layers"]) if "{i}" in row.ours else (0,):
            for part in ("weight", "bias") if "{part}" in row.ours else ("",):
                kinds = "qkv" if "{qkv}" in row.theirs else "-"
                theirs = tuple(row.theirs.format(i=i, part=part, qkv=kind) for kind in kinds)
                to_ours, to_theirs = partial(row.way.to_ours, heads), partial(row.way.to_theirs, heads)
                found.append(Link(row.ours.format(i=i, part=part), theirs, to_ours, to_theirs))
    return found


def config_to_theirs(model: Mapping[str, Any], dtype: str, tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the config.json of transformers for a model section.

    Args:
        tokens: the ids that begin a text (`bos`), end it (`eos`) and fill a batch (`pad`). A missing one is written as
            null: the defaults of transformers are ids of published vocabularies (50256 of GPT-2, 1 and 2 of Llama),
            which mean something else, or nothing, in another vocabulary.
    """
    family = family_of(model)
    found = {"model_type": family.name, "architectures": [family.architecture], "torch_dtype": dtype}
    found |= {f"{role}_token_id": tokens.get(role) for role in ROLES}
    found |= {theirs: model[ours] for theirs, (ours, _) in family.fields.items()}
    found |= {option: allowed[0] for option, allowed in family.fixed.items()}
    if family is GPT2:
        return found | {"embd_pdrop": model["dropout"], "attn_pdrop": 0.0}
    return found | {"head_dim": model["hidden"] // model["heads"]}


def config_from_theirs(theirs: Mapping[str, Any], where: Path) -> Model:
    """Return our model section for a config.json of transformers.

    Args:
        where: path of the file, for errors.

    Raises:
        UserError: 415, a model or an option that our models do not support, or an invalid value.
    """
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        do = f"import a model of {' or '.join(FAMILIES)}, or {_ELSEWHERE}"
        raise UserError(415, f"model_type {kind!r:.40} is not supported", do, where=where)
    if theirs.get("quantization_config"):
        raise UserError(415, "quantization_config: quantised weights", "give the original model", where=where)
    family = FAMILIES[kind]
    for option, allowed in family.fixed.items():
        if theirs.get(option) not in allowed:
            what = f"{option} {theirs[option]!s:.60}: our models have {allowed[0]}, which computes another function"
            do = f"import a {kind} model with {option} {allowed[0]}, or {_ELSEWHERE}"
            raise UserError(415, what, do, where=where)
    read = {ours: theirs.get(name, default) for name, (ours, default) in family.fields.items()}
    read |= {"rope_theta": _theta(theirs, where) or read["rope_theta"] or 10000.0} if family is LLAMA else {}
    names = {ours: name for name, (ours, _) in family.fields.items()}
    do = "give a config.json as transformers writes it"
    if lacking := [names[ours] for ours, value in read.items() if value is ...]:
        raise UserError(415, f"{lacking[0]} is missing", do, where=where)
    try:
        model = Model(**family.options, **read)
    except ValidationError as error:
        fault = error.errors()[0]
        what = f"{names[str(fault['loc'][0])]}: {fault['msg']}, got {fault['input']!r:.40}"
        raise UserError(415, what, do, where=where) from None
    size = theirs.get("head_dim")
    if family is LLAMA and size not in (None, model.hidden / model.heads):
        what = f"head_dim {size!r:.40}: our models have hidden_size / num_attention_heads, "
        what += f"{model.hidden} / {model.heads}"
        raise UserError(415, what, f"import a model with that, or {_ELSEWHERE}", where=where)
    return model


def _theta(theirs: Mapping[str, Any], where: Path) -> object:
    """Return the base of rotary angles from its field; like transformers, use the older field if there are two.

    Raises:
        UserError: 415, scaled angles, or a field that is not a mapping.
    """
    fields = {name: theirs.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, found in fields.items():
        if not isinstance(found, dict):
            do = "give a config.json as transformers writes it"
            raise UserError(415, f"{name}: expected a mapping, got {found!r:.40}", do, where=where)
        for key in ("rope_type", "type"):
            if found.get(key) not in ("default", None):
                what = f"{name}.{key} {found[key]!r:.40}: no option here scales rotary angles"
                raise UserError(415, what, f"import a model with {key} 'default', or {_ELSEWHERE}", where=where)
    return (fields["rope_scaling"] or fields["rope_parameters"]).get("rope_theta")


def is_no_parameter(name: str, model: Mapping[str, Any]) -> bool:
    """Return whether a transformers tensor can be left out without changing what the model computes."""
    tied_head = model["tie_embeddings"] and name == HEAD
    return tied_head or re.fullmatch(family_of(model).no_parameters, name) is not None
