"""Convert a config to a flat mapping of "section.key" to value, and write it to a file. Does not import torch."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.config.schema import Config


def flatten(config: BaseModel) -> dict[str, Any]:
    """Return the value of every option by its "section.key", as users write it."""
    return dict(_flatten(config, ""))


def plain(config: BaseModel) -> dict[str, Any]:
    """Return the value of every option by its "section.key", in JSON's types."""
    return {key: _in_json(value) for key, value in flatten(config).items()}


def option_keys() -> list[str]:
    """Return every option's dotted key."""
    return list(flatten(Config()))


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
    try:
        replace_file(path, text.getvalue())
    except OSError as error:
        raise UserError(401, f"cannot be written: {error.strerror}", "choose another run.dir", where=path) from None


def _flatten(section: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    values = section.model_dump(by_alias=True)
    for name, field in type(section).model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.default, BaseModel):
            yield from _flatten(getattr(section, name), f"{key}.")
        else:
            yield key, values[field.alias or name]


def _in_json(value: Any) -> Any:
    """Return a value of a config in JSON's types; leave out null values in nested sections."""
    if isinstance(value, dict):
        return {key: _in_json(inner) for key, inner in value.items() if inner is not None}
    return [_in_json(inner) for inner in value] if isinstance(value, list | tuple) else value
