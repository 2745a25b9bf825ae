"""Read the tables of families.yaml: options, fields of config.json, blocks, and names of tensors of each family.

A family has no code of its own. `fields.py` converts config.json by these tables, `blocks.py` its windows and rotary
positions, `tensors.py` its tensors. To add a family, add a table, and a model to tests/tools/convert/models.py. Keys:

    architecture    in config.json
    options         our options that all models of the family share
    fields          field of config.json: our options that it sets, after the name of a conversion (`CONVERSIONS`)
    required        fields without a default
    absent          the values that transformers takes for absent fields
    fixed           field: the values that our models support; the first one is written
    known           field: the values that describe what transformers' model computes anyway; not written
    whole_heads     whether transformers refuses a hidden size that is no multiple of the heads
    rows            our parameter: the tensors of transformers, after the name of a way (`WAYS`); * is weight and bias
    layer, block    the beginning of transformers' names in block i, and the rows of a block
    blocks          windows and positions (`Blocks`); left out: learned positions
    interleaved     whether neighbouring channels turn together
    no_parameters   pattern of tensors that the model computes itself
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from megazero.base.yaml_text import parse_yaml
from megazero.tools.convert.tensors import SAME, WAYS, Rows

REQUIRED = ...
_TABLES = ("options", "fields", "absent", "fixed", "known", "rows", "block")


class Field(NamedTuple):
    """Our options that a field of config.json sets.

    Attributes:
        ours: their names in the section model.
        read, write: convert the value to ours, and back.
        values: their values -> ours, if only these are supported.
    """

    ours: tuple[str, ...]
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value
    values: dict[Any, Any] | None = None


def _inverse_square(scale: float) -> float | int:
    """Return the scalar whose inverse root is a scale: an integer, unless it is far from one."""
    found = scale**-2
    return round(found) if math.isclose(found, round(found), rel_tol=1e-12) else found


_GELUS = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_erf", "relu2": "relu2"}
CONVERSIONS: dict[str, Field] = {
    "gated": Field(("activation",), values={"silu": "swiglu"}),
    "gated_gelu": Field(("activation",), values={"gelu_pytorch_tanh": "geglu"}),
    "plain": Field(("activation",), values=_GELUS),
    "inverse": Field((), lambda divisor: 1 / divisor, lambda scale: 1 / scale),
    "inverse_root": Field((), lambda scalar: index(scalar) ** -0.5, _inverse_square),  # transformers wants an integer
    "parallel": Field((), lambda given: "parallel" if given else "serial", lambda kind: kind == "parallel"),
}


@dataclass(frozen=True)
class Blocks:
    """The windows and rotary positions of a family's blocks.

    Attributes:
        window: which blocks have `sliding_window`: none, all, or types (by layer_types).
        switch: whether `use_sliding_window` must be true.
        every: each block of this number is full if layer_types is absent (`sliding_window_pattern`).
        still: blocks without positions: none; full, if there is a window; always: full; listed: no_rope_layers.
        nested: whether each type of block has rotary parameters of its own.
        theta, local_theta: transformers' base of the angles, if the field is absent.
        share: its share of the channels that turn.
        also: rotary parameters that only some families read: partial_rotary_factor, alpha, llama_4_scaling_beta.
        theta_name, share_name: fields that hold them.
    """

    window: str = "none"
    switch: bool = False
    every: int = 0
    still: str = "none"
    nested: bool = False
    theta: float = 10000.0
    local_theta: float = 10000.0
    share: float = 1.0
    theta_name: str = "rope_theta"
    share_name: str = "partial_rotary_factor"
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A family of transformers models; the attributes are the keys above, converted."""

    architecture: str
    options: dict[str, Any]
    fields: dict[str, Field]
    absent: dict[str, Any]
    fixed: dict[str, tuple[Any, ...]]
    known: dict[str, tuple[Any, ...]]
    rows: Rows
    blocks: Blocks | None
    interleaved: bool
    whole_heads: bool
    no_parameters: str

    @property
    def embedding(self) -> str:
        """Return transformers' name of the embedding."""
        return self.rows["embedding.tokens.weight"][0]

    @property
    def head(self) -> str:
        """Return transformers' name of the head."""
        return self.rows["head.weight"][0]


@cache
def tables() -> dict[str, Any]:
    """Return the content of families.yaml."""
    return parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@cache
def families() -> dict[str, Family]:
    """Return all families by their model_type in config.json."""
    return {name: _family(_merged(name)) for name in tables() if name not in ("anywhere", "rotary", "base")}


def _merged(name: str) -> dict[str, Any]:
    """Return the table of a family, with the entries of the one from which it begins."""
    own = tables()[name]
    if "from" not in own:
        return {"without": [], **{table: {} for table in _TABLES}, **own}
    begun = _merged(own["from"])
    kept = {
        table: {key: value for key, value in begun[table].items() if key not in own.get("without", ())}
        | own.get(table, {})
        for table in _TABLES
    }
    return begun | own | kept | {"required": [*begun["required"], *own.get("required", [])]}


def _family(table: dict[str, Any]) -> Family:
    block = {
        " ".join(f"blocks.{{i}}.{one}" for one in ours.split()): _prefixed(theirs, table["layer"])
        for ours, theirs in table["block"].items()
    }
    return Family(
        table["architecture"],
        dict(table["options"]),
        {name: _field(way) for name, way in table["fields"].items()},
        dict.fromkeys(table["fields"]) | table["absent"] | dict.fromkeys(table["required"], REQUIRED),
        {name: tuple(values) for name, values in table["fixed"].items()},
        {name: (*values, None) for name, values in table["known"].items()},
        {_named(ours): _row(theirs) for ours, theirs in (table["rows"] | block).items()},
        Blocks(**table["blocks"] | {"also": tuple(table["blocks"].get("also", ()))}) if "blocks" in table else None,
        table.get("interleaved", False),
        table.get("whole_heads", False),
        table["no_parameters"],
    )


def _field(text: str) -> Field:
    first, *rest = text.split()
    known = CONVERSIONS.get(first)
    return Field((first, *rest)) if known is None else known._replace(ours=known.ours or tuple(rest))


def _prefixed(text: str, layer: str) -> str:
    return " ".join(word if word in WAYS else layer + word for word in text.split())


def _row(text: str) -> tuple[str, Any]:
    first, *rest = text.split()
    return _named(" ".join(rest if first in WAYS else [first, *rest])), WAYS.get(first, SAME)


def _named(text: str) -> str:
    return text.replace("*", "{part}")
