"""Define the rules between options of the section `model`, for `rules.py`."""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.config.relation import Relation, Values, divides

# The options of rotary positions that each kind needs, and those that it may have.
ROPE_OPTIONS = {
    "plain": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("alpha",), ()),
    "llama3": (("factor", "original"), ("low", "high")),
    "yarn": (
        ("factor", "original"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all", "truncate"),
    ),
    "longrope": (("factor", "original", "short", "long"), ("attention_factor",)),
}
_ALWAYS = ("theta", "share", "kind")


def head_dim(v: Values) -> int:
    """Return the width of a head."""
    return v["model.head_dim"] or v["model.hidden"] // v["model.heads"]


def _ropes(v: Values) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the rotary positions of each kind of block that has any."""
    for name, kind in (v["model.layer_kinds"] or {}).items():
        if kind["rope"] is not None:
            yield name, kind["rope"]


def _wrong_ropes(v: Values) -> Iterator[str]:
    """Yield what is wrong with the rotary positions of each kind of block."""
    for name, rope in _ropes(v):
        needed, allowed = ROPE_OPTIONS[rope["kind"]]
        given = [option for option, value in rope.items() if value is not None and option not in _ALWAYS]
        lacking = [option for option in needed if option not in given]
        unused = [option for option in given if option not in (*needed, *allowed)]
        if lacking:
            yield f"{name}: kind {rope['kind']} needs {lacking[0]}"
        elif unused:
            yield f"{name}: kind {rope['kind']} has no {unused[0]}"
        elif wrong := _wrong_numbers(rope, rope["theta"] or v["model.rope_theta"], head_dim(v)):
            yield f"{name}: kind {rope['kind']} needs {wrong}"


def _wrong_numbers(rope: Mapping[str, Any], theta: float, head_dim: int) -> str:
    """Return what the numbers of rotary positions must be, if they are not."""
    needs = {
        "4 channels that turn": rope["kind"] == "ntk" and int(head_dim * rope["share"]) < 4,
        "low < high": (rope["low"] or 1) >= (rope["high"] or 4),
        "theta > 1": rope["kind"] == "yarn" and theta == 1,
        "original > 1": rope["kind"] == "longrope" and rope["original"] == 1,
        "mscale and mscale_all together": (rope["mscale"] is None) != (rope["mscale_all"] is None),
    }
    return next((need for need, lacking in needs.items() if lacking), "")


def _wrong_pairs(v: Values) -> Iterator[str]:
    """Yield which kinds of block turn a wrong number of channels."""
    for name, rope in _ropes(v):
        turning = int(head_dim(v) * rope["share"])
        lists = {key: len(rope[key]) for key in ("short", "long") if rope[key] is not None}
        if turning % 2 or turning < 2:
            yield f"{name}: {head_dim(v)} * {rope['share']} = {turning} channels"
        yield from (
            f"{name}: {count} in {key}, {turning} channels" for key, count in lists.items() if 2 * count != turning
        )


def _unknown_kinds(v: Values) -> list[str]:
    return sorted({*(v["model.layer_pattern"] or ())} - {*(v["model.layer_kinds"] or {})})


def _is_learned(v: Values) -> bool:
    return v["model.position"] == "learned"


MODEL_RELATIONS: tuple[Relation, ...] = (
    Relation(
        "model.hidden % model.heads == 0 with model.head_dim null",
        lambda v: v["model.head_dim"] is not None or v["model.hidden"] % v["model.heads"] == 0,
        "change model.heads or model.hidden, or give model.head_dim",
        lambda v: f"{v['model.hidden']} % {v['model.heads']} = {v['model.hidden'] % v['model.heads']}",
    ),
    divides("model.kv_heads", "model.heads", "change model.kv_heads or model.heads"),
    Relation(
        "channels of a head, or their share in model.layer_kinds, come in pairs with model.position rotary",
        lambda v: _is_learned(v) or (head_dim(v) % 2 == 0 and not any(_wrong_pairs(v))),
        "change model.head_dim, model.heads, or share, short and long of model.layer_kinds",
        lambda v: next(_wrong_pairs(v), f"{head_dim(v)} channels"),
    ),
    Relation(
        "rope in model.layer_kinds has the options of its kind",
        lambda v: not any(_wrong_ropes(v)),
        "give what the kind needs, and nothing that it does not have",
        lambda v: next(_wrong_ropes(v)),
    ),
    Relation(
        "rope in model.layer_kinds is not given with model.position learned",
        lambda v: not _is_learned(v) or all(_is_default(rope) for _, rope in _ropes(v)),
        "use model.position=rotary",
        lambda v: f"{next(name for name, rope in _ropes(v) if not _is_default(rope))} has one",
    ),
    Relation(
        "names in model.layer_pattern are in model.layer_kinds",
        lambda v: not _unknown_kinds(v),
        "give each kind of block its window and rope in model.layer_kinds",
        lambda v: f"{_unknown_kinds(v)[0]} is not",
    ),
    Relation(
        "model.norm_place == pre with model.residual parallel or parallel_shared",
        lambda v: v["model.residual"] == "serial" or v["model.norm_place"] == "pre",
        "use model.norm_place=pre: parallel branches have no norms of their own after them",
    ),
    Relation(
        "model.norm_bias == null with model.norm rmsnorm",
        lambda v: v["model.norm"] == "layernorm" or v["model.norm_bias"] is None,
        "use model.norm_bias=null: an RMS norm has no bias",
    ),
)


def _is_default(rope: Mapping[str, Any]) -> bool:
    return rope["kind"] == "plain" and rope["share"] == 1 and rope["theta"] is None
