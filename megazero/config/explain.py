"""`megazero explain`: show every option with its type, default, meaning, and its rules with other options.

The text comes from the pydantic models and rule tables that check configs, so it agrees with the checks. With a config
it shows that config's values. Does not import torch.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megazero.base.errors import UserError
from megazero.config import changes, rules
from megazero.config.flat import flatten, option_fields, option_keys, spelt
from megazero.config.nearest import nearest
from megazero.config.schema import Config


@dataclass(frozen=True)
class Option:
    """One option as shown; `value` is from the given config."""

    key: str
    type: str
    default: Any
    value: Any
    meaning: str
    relations: tuple[str, ...]


def explain(config: Config, selection: str | None) -> list[Option]:
    """Return the option or the options of the section `selection`; None: all options.

    Raises:
        UserError: 104, there is no such option or section.
    """
    values = flatten(config)
    options = [
        Option(key, _type(field), field.default, values[key], field.description or "", tuple(_relations(key)))
        for key, field in option_fields()
        if selection is None or key == selection or key.startswith(f"{selection}.")
    ]
    if not options:
        hint = nearest(selection, option_keys()) if selection is not None else ""
        raise UserError(104, f"no option or section {selection}", hint, where="explain")
    return options


def as_text(options: list[Option]) -> str:
    """Return the options as lines, each followed by its relations."""
    lines = []
    for option in options:
        shown = spelt(option.value)
        default = "" if option.value == option.default else f" (default {spelt(option.default)})"
        lines.append(f"{option.key} = {shown}{default}   [{option.type}]")
        lines.append(f"    {option.meaning}")
        lines += [f"    {relation}" for relation in option.relations]
    return "\n".join(lines)


def _relations(key: str) -> Iterator[str]:
    yield from (str(rule) for rule in (*rules.RELATIONS, *rules.EXCLUSIONS) if key in rule.options)
    may = changes.row_of(key)
    if not may.in_stage:
        yield "a stage may change it"
    if not may.on_resume:
        yield "a resumed run keeps it, unless --allow-change names it"


def _type(field: FieldInfo) -> str:
    """Return the type in words: `integer >= 1`, `one | of | these`, `number or null`."""
    return _name(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = [
            text for item in metadata for source in (item, *getattr(item, "metadata", ())) for text in _bounds(source)
        ]
        return " ".join([_name(inner), *bounds])
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_name(part) for part in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"[{', '.join('...' if part is ... else _name(part) for part in get_args(annotation))}]"
    if get_origin(annotation) is dict:
        return f"{{NAME: {_name(get_args(annotation)[1])}}}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null"}[annotation]


def _bounds(item: Any) -> Iterator[str]:
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        bound = getattr(item, attribute, None)
        if bound is not None and bound < 2**31:  # larger bounds are limits of integers, of no use to a reader
            yield f"{sign} {bound}"
