"""Choose the text of a record, and which records are taken: by fields and plain comparisons; nothing is evaluated."""

import argparse
import json
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megazero.base.errors import UserError

Refuse = Callable[[str], UserError]
MISSING = object()
_CONDITION = re.compile(r"([^=!<>]+)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """Return what a record holds under a path: a key, or keys of objects inside each other, with dots between.

    Bytes, which columns of a table may hold, are text. Raises UnicodeDecodeError: they are not UTF-8.
    """
    found: Any = record
    for key in [path] if path in record else path.split("."):
        if not isinstance(found, dict) or key not in found:
            return MISSING
        found = found[key]
    return found.decode() if isinstance(found, bytes) else found


@dataclass(frozen=True)
class Piece:
    """A part of a document, which is encoded by itself.

    Attributes:
        text: of a corpus at most WHOLE + PIECE_BYTES characters; the last piece of a document may be empty.
        scored: its tokens are trained on.
        id: of the special token whose name the text is; None: the text is text.
        last: it ends its document.
        cut: it ends where the ids may not be those of the whole document.
    """

    text: str
    scored: bool = True
    id: int | None = None
    last: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Condition:
    """A comparison of a field with a value, as `--where` writes it: lang=en, score>=0.5.

    A record without the field does not pass. Order is of numbers alone.
    """

    path: str
    relation: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Return the condition of an option. Raises ArgumentTypeError, as argparse wants it."""
        if (found := _CONDITION.fullmatch(text)) is None:
            raise argparse.ArgumentTypeError(f"expected FIELD=VALUE or another of != < <= > >=, got {text[:40]!r}")
        condition = cls(found[1].strip(), found[2], found[3].strip())
        if condition.relation in _ORDER and _number(condition.value) is None:
            raise argparse.ArgumentTypeError(f"expected a number behind {condition.relation}, got {text[:40]!r}")
        return condition

    def __str__(self) -> str:
        return f"{self.path}{self.relation}{self.value}"

    def holds(self, record: Mapping[str, Any], refuse: Refuse) -> bool:
        """Return whether a record passes. Raises what `refuse` makes: a field that cannot be compared."""
        got, ordered = value_at(record, self.path), self.relation in _ORDER
        if got is MISSING:
            return False
        numeric = isinstance(got, int | float) and not isinstance(got, bool)
        if isinstance(got, dict | list) or (ordered and not numeric):
            kinds = "numbers" if ordered else "words and numbers"
            raise refuse(f"--where {self} compares {kinds}, got {type(got).__name__} there")
        number = _number(self.value)
        if ordered:
            assert number is not None, "held by parse"
            return _ORDER[self.relation](got, number)
        word = got if isinstance(got, str) else json.dumps(got)  # true, false, null
        return (got == number if numeric else word == self.value) == (self.relation == "=")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Taken(ABC):
    """The base class of what is taken of a record: a text (`Select`), or a conversation (`data_tools/chat.py`).

    Attributes:
        fields: paths of the text; of several, the texts are joined by a line end. Of a conversation: of its messages.
        where: conditions that all must hold.
    """

    fields: tuple[str, ...] = ("text",)
    where: tuple[Condition, ...] = ()

    @property
    def paths(self) -> list[str]:
        """Every path that is looked at, once."""
        return list(dict.fromkeys([*self.fields, *(condition.path for condition in self.where)]))

    def pieces(self, record: Any, refuse: Refuse) -> list[Piece] | None:
        """Return the document of a record in pieces; None: a condition does not hold.

        Raises:
            UserError: made by `refuse`: the record has not what is to be taken, or text that UTF-8 cannot hold.
        """
        if isinstance(record, dict) and not all(condition.holds(record, refuse) for condition in self.where):
            return None
        pieces = self._taken(record, refuse)
        try:
            for piece in pieces:
                piece.text.encode()
        except UnicodeEncodeError as error:
            raise refuse(f"character {error.start:,} of the text is half a surrogate pair, not a character") from error
        return pieces

    @abstractmethod
    def _taken(self, record: Any, refuse: Refuse) -> list[Piece]:
        """Return the document of a record."""


class Select(Taken):
    """A text is taken of a record."""

    def _taken(self, record: Any, refuse: Refuse) -> list[Piece]:
        return [Piece("\n".join([self._text_at(record, path, refuse) for path in self.fields]))]

    def _text_at(self, record: Any, path: str, refuse: Refuse) -> str:
        found = value_at(record, path) if isinstance(record, dict) else MISSING
        if isinstance(found, str):
            return found
        if not isinstance(record, dict):
            got = type(record).__name__
        else:
            got = f"keys {', '.join(record)[:60]}" if found is MISSING else f"{type(found).__name__} there"
        raise refuse(f'expected an object with text under "{path}", got {got}')
