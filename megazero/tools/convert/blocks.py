"""Convert the windows and rotary positions of blocks between config.json and `model.layer_kinds`.

transformers has a type for each block (layer_types), one window, and rotary parameters for all blocks or for each type.
Ours is a kind for each block: a window or none, rotary positions or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megazero.config.model_rules import ROPE_OPTIONS
from megazero.plan.model import Rope, Shape
from megazero.tools.convert.families import Blocks, tables

LOCAL, FULL = "sliding_attention", "full_attention"
_KINDS = {"default": "plain", "linear": "linear", "llama3": "llama3", "yarn": "yarn", "longrope": "longrope"}
_KINDS |= {"su": "longrope"}
_BETA = "llama_4_scaling_beta"  # of Ministral 3: queries are scaled by position
_USED = {kind: needed + allowed for kind, (needed, allowed) in ROPE_OPTIONS.items()}


class BlocksError(ValueError):
    """A field of config.json that our blocks do not support; the text names it."""


def read(blocks: Blocks, theirs: Mapping[str, Any], layers: int, longest: int) -> dict[str, Any]:
    """Return our options for the windows and positions of a config.json. Raises BlocksError.

    Args:
        longest: the longest sequence.
    """
    window = theirs.get("sliding_window") if theirs.get("use_sliding_window") or not blocks.switch else None
    window = None if blocks.window == "none" else window
    turned = _listed(theirs, layers) if blocks.still == "listed" else None
    types = _types(blocks, theirs, layers, window, turned)
    ropes = {kind: _rope(blocks, theirs, kind, longest) for kind in dict.fromkeys(types)}
    named: dict[str, dict[str, Any]] = {}
    pattern = []
    for i, kind in enumerate(types):
        local = window is not None and (blocks.window == "all" or kind == LOCAL)
        still = blocks.still == "full" and window is not None and kind == FULL
        still |= (blocks.still == "always" and not local) or (turned is not None and not turned[i])
        name = ("local_" * local + "still" * still).strip("_") or "full"
        named[name] = {"window": window if local else None, "rope": None if still else ropes[kind]}
        pattern.append(name)
    found: dict[str, Any] = {}
    scaled = _parameters(theirs, types[0], nested=False)
    if scaled.get(_BETA):
        found["query_scale"] = {"beta": scaled[_BETA], "original": scaled["original_max_position_embeddings"]}
    only = next(iter(named.values()))
    if len(named) == 1 and only["window"] is None and only["rope"] and only["rope"].keys() == {"theta"}:
        return found | {"rope_theta": only["rope"]["theta"]}
    period = next(n for n in range(1, layers + 1) if all(pattern[i] == pattern[i - n] for i in range(n, layers)))
    return found | {"layer_kinds": named, "layer_pattern": tuple(pattern[:period]) if len(named) > 1 else None}


def write(blocks: Blocks, shape: Shape) -> dict[str, Any]:
    """Return the fields of config.json for a model's windows and positions; what they cannot say is left out."""
    kinds = [shape.kind(i) for i in range(shape.layers)]
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    types = [LOCAL if kind.window is not None else FULL for kind in kinds]
    found: dict[str, Any] = {} if blocks.window == "none" else {"sliding_window": window}
    if blocks.switch:
        found["use_sliding_window"] = window is not None
    if blocks.window == "types":
        found["layer_types"] = types
    if blocks.still == "listed":
        found["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
    ropes = {name: kind.rope for name, kind in zip(types, kinds, strict=True) if kind.rope is not None}
    given = {name: _written(rope) for name, rope in ropes.items()}
    if blocks.nested:  # and as transformers before 5 reads it
        full, local = given.get(FULL) or {}, given.get(LOCAL) or {}
        older = {"rope_theta": full.get("rope_theta"), "rope_local_base_freq": local.get("rope_theta")}
        older |= {"rope_scaling": full} if full.get("rope_type", "default") != "default" else {}
        return found | {name: value for name, value in older.items() if value} | {"rope_parameters": given}
    first = next(iter(given.values()), {"rope_type": "default", "rope_theta": blocks.theta})
    if shape.query_scale is not None:
        first |= {_BETA: shape.query_scale[0], "original_max_position_embeddings": shape.query_scale[1]}
    named = {blocks.theta_name: first["rope_theta"], blocks.share_name: first.get("partial_rotary_factor", 1.0)}
    scaled = {} if first["rope_type"] == "default" else {"rope_scaling": first}  # as transformers before 5 reads it
    if first["rope_type"] == "longrope":
        original = named["original_max_position_embeddings"] = first["original_max_position_embeddings"]
        derived = "attention_factor" not in first and first["factor"] == shape.seq_len / original
        older = {"type": "longrope", "short_factor": first["short_factor"], "long_factor": first["long_factor"]}
        scaled = {"rope_scaling": older} if derived else {}
    return found | named | {"rope_parameters": first} | scaled


def _types(
    blocks: Blocks, theirs: Mapping[str, Any], layers: int, window: int | None, turned: Sequence[bool] | None
) -> list[str]:
    """Return the type of every block; if the field is absent, as transformers derives it."""
    if blocks.window != "types":
        return [FULL] * layers
    if (types := theirs.get("layer_types")) is not None:
        if not isinstance(types, list) or len(types) != layers or not {*types} <= {LOCAL, FULL}:
            raise BlocksError(f"layer_types: expected {layers} of {LOCAL} and {FULL}, got {types!s:.60}")
        return types
    if blocks.every:
        every = theirs.get("sliding_window_pattern", blocks.every)
        if not isinstance(every, int) or every < 1:
            raise BlocksError(f"sliding_window_pattern: expected a number of blocks, got {every!r:.40}")
        return [FULL if (i + 1) % every == 0 else LOCAL for i in range(layers)]
    if turned is not None:
        return [LOCAL if window is not None and not each else FULL for each in turned]
    return [LOCAL if window is not None and i >= theirs["max_window_layers"] else FULL for i in range(layers)]


def _listed(theirs: Mapping[str, Any], layers: int) -> list[bool]:
    """Return whether each block has rotary positions, from no_rope_layers (1: it has)."""
    listed = theirs.get("no_rope_layers")
    every = theirs.get("no_rope_layer_interval", 4)
    if listed is None:
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or not {*listed} <= {0, 1}:
        raise BlocksError(f"no_rope_layers: expected {layers} of 0 and 1, got {listed!s:.60}")
    return [each == 1 for each in listed]


def _parameters(theirs: Mapping[str, Any], kind: str, *, nested: bool) -> dict[str, Any]:
    """Return the rotary parameters of a type of block, from the newer field or the older one, which wins."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(theirs.get(name) or {}, dict):
            raise BlocksError(f"{name}: expected a mapping, got {theirs[name]!r:.40}")
    older, newer = theirs.get("rope_scaling") or {}, theirs.get("rope_parameters") or {}
    if nested and not {*newer} <= {LOCAL, FULL}:
        raise BlocksError(f"rope_parameters: expected {LOCAL} and {FULL}, got {', '.join(newer):.60}")
    if nested:
        return dict(newer.get(kind) or {}) | (older if kind == FULL else {})
    return dict(older or newer)


def _rope(blocks: Blocks, theirs: Mapping[str, Any], kind: str, longest: int) -> dict[str, Any]:
    """Return the rotary positions of a type of block, as a section `rope` of ours."""
    given = _parameters(theirs, kind, nested=blocks.nested)
    local = blocks.nested and kind == LOCAL
    theta_name = "rope_local_base_freq" if local else blocks.theta_name
    given.setdefault("rope_theta", theirs.get(theta_name) or (blocks.local_theta if local else blocks.theta))
    given.setdefault("partial_rotary_factor", theirs.get(blocks.share_name, blocks.share))
    given = {name: value for name, value in given.items() if value is not None}
    plain = {"partial_rotary_factor": 1.0, "alpha": 0, _BETA: 0}
    if odd := next(
        (name for name, value in plain.items() if given.get(name, value) != value and name not in blocks.also), None
    ):
        raise BlocksError(f"{odd} {given[odd]!s:.40}: transformers' models of this family do not read it")
    if not (given.get("mscale") and given.get("mscale_all_dim")):  # one alone has no effect
        given = {name: value for name, value in given.items() if not name.startswith("mscale")}
    of_type = given.get("rope_type") or given.get("type") or "default"
    ours = "ntk" if of_type == "dynamic" and given.get("alpha") else _KINDS.get(str(of_type))
    if ours is None:
        raise BlocksError(f"rope_type {of_type!r:.40}: the angles would grow with the text")
    outer = theirs.get("original_max_position_embeddings") if not blocks.nested else None
    if "original" in _USED[ours]:
        given["original_max_position_embeddings"] = outer or given.get("original_max_position_embeddings") or longest
    if ours in ("yarn", "longrope") and given.get("factor") is None:
        given["factor"] = longest / given["original_max_position_embeddings"]
    if blocks.nested:
        given.pop("truncate", None)  # transformers ignores it there
    names = {theirs_: own for theirs_, own in tables()["rotary"].items() if own in ("theta", "share", *_USED[ours])}
    found = {own: given[name] for name, own in names.items() if name in given}
    found |= {own: tuple(found[own]) for own in ("short", "long") if own in found}
    if found.get("share") == 1:
        del found["share"]
    return found | ({} if ours == "plain" else {"kind": ours})


def _written(rope: Rope) -> dict[str, Any]:
    """Return rotary parameters of config.json."""
    kind = next(theirs for theirs, own in {**_KINDS, "dynamic": "ntk"}.items() if own == rope.kind)
    required = {"factor": 1.0} if rope.kind == "ntk" else {}  # transformers requires it, and ignores it next to alpha
    return {"rope_type": kind} | required | dict(_values(rope))


def _values(rope: Rope) -> Iterator[tuple[str, Any]]:
    for name, own in tables()["rotary"].items():
        value = getattr(rope, own)
        if own == "theta" or (own == "share" and value != 1) or (own in _USED[rope.kind] and value is not None):
            yield name, list(value) if isinstance(value, tuple) else value
