"""Convert config.json of transformers to our section `model` and back, by the tables of `families.py`.

A model fits a family if its config.json, written by the family's table and read again, describes the same model. So
no second list says what a family can express.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megazero.base.errors import UserError
from megazero.builders.pipeline import model_shape
from megazero.config.schema import Config, Model, resolved
from megazero.plan.model import Shape
from megazero.tools.convert import blocks
from megazero.tools.convert.families import REQUIRED, Family, Field, families, tables

ROLES = ("bos", "eos", "pad")  # of special tokens
_ELSEWHERE = "train transformers' own class with megazero.shard"
_WRITTEN = "give a config.json as transformers writes it"
_OF_TRAINING = ("dropout", "init_std", "init_depth", "z_loss", "seq_len")


def family_of(theirs: Mapping[str, Any], where: Path) -> Family:
    """Return the family of a config.json. Raises UserError 415: it is not supported."""
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        do = f"import a model of another family, or {_ELSEWHERE}"
        raise UserError(415, f"model_type {kind!r:.40} is not supported", do, where=where)
    return families()[kind]


def model_from_theirs(theirs: Mapping[str, Any], where: Path) -> Model:
    """Return our model section for a config.json of transformers.

    Args:
        where: path of the file, for errors.

    Raises:
        UserError: 415, a model, a field or a value that our models do not support.
    """
    family = family_of(theirs, where)
    if theirs.get("quantization_config"):
        raise UserError(415, "quantization_config: quantised weights", "give the original model", where=where)
    given = {**family.absent, **theirs}
    _require_known(family, theirs, where)
    needed = (name for name, value in family.absent.items() if value is REQUIRED and theirs.get(name) is None)
    if lacking := next(needed, None):
        raise UserError(415, f"{lacking} is missing", _WRITTEN, where=where)
    names, values = {}, {}
    for name, way in family.fields.items():
        value = _read(name, way, given.get(name), theirs["model_type"], where)
        if odd := next((ours for ours in way.ours if values.get(ours, value) != value), None):
            what = f"{names[odd]} {values[odd]} and {name} {value}: our models have one value there, model.{odd}"
            raise UserError(415, what, "give both fields one value", where=where)
        values |= dict.fromkeys(way.ours, value)
        names |= dict.fromkeys(way.ours, name)
    try:
        model = Model.model_validate(_nested(values))  # checks the numbers on which what follows depends
        if family.whole_heads and model.hidden % model.heads:
            raise blocks.BlocksError(f"hidden_size {model.hidden} is no multiple of {model.heads} heads")
        root = model.hidden**0.5
        values |= {name: root if value == "root of hidden" else value for name, value in family.options.items()}
        if family.blocks is not None:
            values |= blocks.read(family.blocks, given, model.layers, model.seq_len)
        return Model.model_validate(_nested(values))
    except ValidationError as error:
        fault = error.errors()[0]
        ours = ".".join(map(str, fault["loc"]))
        what = f"{names.get(ours, ours)}: {fault['msg']}, got {fault['input']!r:.40}"
        raise UserError(415, what, _WRITTEN, where=where) from None
    except blocks.BlocksError as error:
        raise UserError(415, str(error), f"import another model, or {_ELSEWHERE}", where=where) from None
    except (TypeError, KeyError, ArithmeticError) as error:
        raise UserError(415, f"a field has a value of another kind: {error}", _WRITTEN, where=where) from None


def _read(name: str, way: Field, value: Any, kind: str, where: Path) -> Any:
    """Return our value for a field. Raises UserError 415: a value that our models do not support."""
    if way.values is not None:
        if value not in [*way.values]:  # it may be a list
            what = f"{name} {value!s:.60}: our models have {' or '.join(map(str, way.values))} there"
            raise UserError(415, what, f"import a {kind} model with that, or {_ELSEWHERE}", where=where)
        return way.values[value]
    try:
        return value if value is None else way.read(value)
    except (TypeError, ArithmeticError):
        raise UserError(415, f"{name}: expected a number, got {value!r:.40}", _WRITTEN, where=where) from None


def _require_known(family: Family, theirs: Mapping[str, Any], where: Path) -> None:
    """Refuse fields of config.json that nothing here reads, and values that compute another function."""
    checked = family.fixed | family.known
    known = {*family.fields, *family.absent, *checked, *tables()["anywhere"]}
    if odd := next((name for name, value in theirs.items() if name not in known and value is not None), None):
        what = f"{odd:.60} {theirs[odd]!s:.60}: the field is unknown, and may change what the model computes"
        raise UserError(415, what, f"remove it if it does not; or {_ELSEWHERE}", where=where)
    for name, allowed in checked.items():
        if theirs.get(name, allowed[-1]) not in allowed:
            what = f"{name} {theirs[name]!s:.60}: our models have {allowed[0]}, which computes another function"
            do = f"import a {theirs['model_type']} model with {name} {allowed[0]}, or {_ELSEWHERE}"
            raise UserError(415, what, do, where=where)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"bias": {"qkv": ...}} for {"bias.qkv": ...}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[last] = value
    return found


def shape_of(model: Model) -> Shape:
    """Return the shape of a model section, with every default resolved."""
    return model_shape(resolved(Config(model=model)))


def to_theirs(name: str, model: Model) -> dict[str, Any]:
    """Return the config.json of a family for a model section; options that it lacks are left out."""
    family, shape = families()[name], shape_of(model)
    ours = {each.name: getattr(shape, each.name) for each in fields(shape)}
    ours |= {f"bias.{place}": shape.biased(place) for place in ("qkv", "out", "mlp")}
    ours |= {"head_dim": shape.head_dim, "attention_scale": shape.attention_scale or shape.head_dim**-0.5}
    ours |= {"softcap.attention": shape.attention_cap, "softcap.logits": shape.logit_cap}
    found: dict[str, Any] = {"model_type": name, "architectures": [family.architecture]}
    found |= {field: allowed[0] for field, allowed in family.fixed.items() if allowed[0] is not None}
    for field, way in family.fields.items():
        value = ours[way.ours[0]]
        inverse = {own: theirs for theirs, own in reversed((way.values or {}).items())}
        found[field] = way.write(value) if way.values is None else inverse.get(value)
    return found | ({} if family.blocks is None else blocks.write(family.blocks, shape))


def differences(name: str, model: Model) -> list[str]:
    """Return what a family cannot express of a model: nothing if the model fits."""
    own = _as_computed(shape_of(model))
    try:
        again = _as_computed(shape_of(model_from_theirs(to_theirs(name, model), Path("config.json"))))
    except UserError as error:
        return [error.what] * len(own)  # as far away as a model with nothing in common
    odd = (field for field, value in own.items() if not _equal(value, again[field]))
    return [f"model.{field} {own[field]!s:.60} would be {again[field]!s:.60}" for field in odd]


def _as_computed(shape: Shape) -> dict[str, Any]:
    """Return what a trained model computes: equal for two shapes that compute the same function."""
    used = [replace(shape.kind(i), rope=shape.rope_of(shape.kind(i))) for i in range(shape.layers)]
    biases = {
        place for place in ("qkv", "out", "mlp", "norm") if shape.biased(place) and (place != "norm" or shape.layernorm)
    }
    scale = shape.attention_scale or shape.head_dim**-0.5
    normed = shape.qk_norm != "none"
    resolved_ = {"kinds": used, "biases": biases, "head_size": shape.head_dim, "attention_scale": scale}
    resolved_ |= {"norm_cast": None if shape.layernorm else shape.norm_cast}
    resolved_ |= {"qk_norm_at": shape.qk_norm_at if normed else None}
    return {
        each.name: resolved_.get(each.name, getattr(shape, each.name))
        for each in fields(shape)
        if each.name not in _OF_TRAINING
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other


def fitting(model: Model, asked: str | None, imported: str | None) -> str:
    """Return the family to export a model as: the one asked for, that of its import, or the first that fits.

    Raises:
        UserError: 415, it does not fit, or none does.
    """
    if asked is not None and asked not in families():
        raise UserError(415, f"--as {asked}: not a family", f"give one of {', '.join(families())}")
    names = [asked] if asked is not None else sorted(families(), key=lambda name: name != imported)
    lacking: dict[str, list[str]] = {}
    for name in names:
        lacking[name] = differences(name, model)
        if not lacking[name]:
            return name
    nearest = min(names, key=lambda name: len(lacking[name]))
    what = f"{'the family' if asked else 'no family of transformers has this model:'} {nearest}: {lacking[nearest][0]}"
    raise UserError(415, what, "export another model, or use it here")
