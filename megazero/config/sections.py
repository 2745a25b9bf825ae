"""Define the base of config sections, types of numbers and text, and lists of token files."""

import re
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
# Bounds of sizes that are looped over or allocated, far above any real training: a typing mistake gives an error at
# once, not hours of work.
Layers = Annotated[int, Field(ge=1, le=4096)]
Ranks = Annotated[int, Field(ge=1, le=16_384)]
Sequences = Annotated[int, Field(ge=1, le=2**20)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\p{Cc}\u{2028}\u{2029}]*$")]  # of one line: paths, names


Above0 = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # decay rate of a running mean, or dropout rate
T = TypeVar("T")


def option(default: T, description: str, *, alias: str | None = None, strict: bool | None = None) -> T:
    """Return the field of an option; the arguments are those of pydantic's `Field`."""
    return Field(default=default, alias=alias, description=description, strict=strict)


class Section(BaseModel):
    """The base of all sections: frozen, strict, without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def given(self) -> dict[str, Any]:
        """Return the values that are not null, by field name."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


# Names become parts of metrics' keys, so they are short and plain.
IN_NAMES = "A-Za-z0-9 _.,+=@:~-"  # allowed characters, as in a regular expression's [...]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=f"^[{IN_NAMES}]+$")]


class TokenFiles(Section):
    """Token files with a name; the default name is the end of their path."""

    path: Text = Field(description="Token files: path without .bin/.idx, from the current folder, or a folder of them.")
    name: Name | None = Field(
        default=None, validate_default=True, description="Name in metrics and messages; null: last part of the path."
    )

    @field_validator("name")
    @classmethod
    def _named(cls, name: str | None, info: ValidationInfo) -> str:
        path = info.data.get("path", "")
        return name or re.sub(f"[^{IN_NAMES}]", "_", PurePath(path).name or path)[-64:]


class Source(TokenFiles):
    weight: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Relative share of all samples, in tokens.")


Sources = Annotated[tuple[Source, ...], Field(min_length=1, max_length=100)]
