"""Convert a config to a flat mapping of "section.key" to value, and write it to a file. Does not import torch."""

import io
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from megazero.base.files import replace_file, writing
from megazero.config.schema import Config


def option_fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the "section.key" of every option with its field, in order."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.default, BaseModel):
            yield from option_fields(type(field.default), f"{key}.")
        else:
            yield key, field


def flatten(config: Config) -> dict[str, Any]:
    """Return the value of every option by its "section.key", as users write it."""
    values = config.model_dump(by_alias=True)
    return {key: reduce(getitem, key.split("."), values) for key, _ in option_fields()}


def plain(config: Config) -> dict[str, Any]:
    """Return the value of every option by its "section.key", in JSON's types."""
    return {key: _in_json(value) for key, value in flatten(config).items()}


def option_keys() -> list[str]:
    """Return every option's dotted key."""
    return [key for key, _ in option_fields()]


def run_dir(config: Config, name: str) -> str:
    """Return the run's folder: `run.dir`, or runs/<name of the config>."""
    return config.run.dir or f"runs/{name}"


def spelt(value: Any) -> str:
    """Return a value as YAML would spell it."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text.isprintable() else ascii(text)


def dump(config: Config, path: Path) -> None:
    """Write the config as YAML from which `load` returns an equal config.

    Raises:
        UserError: 401, the file cannot be written.
    """
    yaml, text = YAML(), io.BytesIO()
    yaml.width = 120
    yaml.dump(config.model_dump(by_alias=True, mode="json"), text)
    with writing(path, 401, "choose another run.dir"):
        replace_file(path, text.getvalue())


def _in_json(value: Any) -> Any:
    """Return a value of a config in JSON's types; leave out null values in nested sections."""
    if isinstance(value, dict):
        return {key: _in_json(inner) for key, inner in value.items() if inner is not None}
    return [_in_json(inner) for inner in value] if isinstance(value, list | tuple) else value
