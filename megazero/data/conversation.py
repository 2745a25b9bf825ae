"""Render conversations for a model: special tokens that the template writes become ids, those in messages stay text.

A special token's name that the template writes becomes its id; a name inside a message stays plain text, so that no
message can end a turn, or begin one of another role, by writing the name. To tell them apart, a mark that no text
contains is put into every name in the strings of a record, and next to a part of a name at either end of a string; it
is removed after the search for names. (A role gets no mark: it must be a plain name.)
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megazero.base.errors import UserError
from megazero.data.templates import BEGIN, END, RenderError, Template
from megazero.data.tokenizer import Tokenizer

Refuse = Callable[[str], UserError]
_BREAK = "\ufdd2"  # put into a name that is plain text; like BEGIN and END, a Unicode noncharacter


@dataclass(frozen=True)
class SpecialNames:
    """The names of special tokens, with their ids."""

    specials: Mapping[str, int]

    def pieces(self, text: str) -> list[tuple[str, int | None]]:
        """Split a rendered text into (text, None) and the names of special tokens with their ids."""
        parts = re.split(f"({self.pattern})", text)
        return [
            (part.replace(_BREAK, ""), self.specials[part] if at % 2 else None) for at, part in enumerate(parts) if part
        ]

    def broken(self, value: Any, refuse: Refuse) -> Any:
        """Return a value of a record with a mark after the first character of every name in its strings.

        A string that begins or ends with a part of a name also gets a mark there, because adjacent text could complete
        the name. White space at the ends is ignored, as templates strip it.
        """
        if isinstance(value, list):
            return [self.broken(each, refuse) for each in value]
        if isinstance(value, dict):
            return {self._apart(key): self.broken(each, refuse) for key, each in value.items()}
        if not isinstance(value, str):
            return value
        if odd := next((mark for mark in (BEGIN, END, _BREAK) if mark in value), None):
            raise refuse(f"U+{ord(odd):04X} is in a text, but is not a Unicode character")
        text, (heads, tails) = self._apart(value), self._parts
        body, start = text.strip(), len(text) - len(text.lstrip())
        first, last = _BREAK * body.startswith(tails), _BREAK * body.endswith(heads)
        return f"{text[:start]}{first}{body}{last}{text[start + len(body) :]}"

    def _apart(self, text: str) -> str:
        """Return a text with a mark in every name of a special token, including overlapping names."""
        return re.sub(f"(?s)(?=(?:{self.pattern}))(.)", rf"\1{_BREAK}", text)

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the proper prefixes and the proper suffixes of the names of special tokens."""
        cuts = [(name, at) for name in self.specials for at in range(1, len(name))]
        return tuple({name[:at] for name, at in cuts}), tuple({name[at:] for name, at in cuts})

    @cached_property
    def pattern(self) -> str:
        """Return a pattern that matches the name of a special token; longer names match first."""
        names = sorted((name for name in self.specials if len(name) > 1), key=lambda name: (-len(name), name))
        return "|".join(map(re.escape, names)) or "(?!)"


def prompt_of(
    messages: Sequence[Mapping[str, Any]], template: Template, tokenizer: Tokenizer, where: object
) -> list[int]:
    """Return the ids of a conversation, at `where`, up to the beginning of the next answer.

    Raises:
        UserError: 227, the template cannot render it; 226, the template itself is faulty.
    """

    def refuse(what: str) -> UserError:
        return UserError(227, what, "repair the conversation", where=where)

    names = SpecialNames(tokenizer.specials)
    if not all(isinstance(one, Mapping) and isinstance(one.get("content"), str) for one in messages):
        raise refuse('expected messages such as {"role": "user", "content": "text"}')
    try:
        given = [names.broken(dict(message), refuse) | {"role": message.get("role")} for message in messages]
        text = template.render(given, None, prompt=True).replace(BEGIN, "").replace(END, "")
    except RenderError as error:
        raise refuse(str(error)) from None
    pieces = names.pieces(text)
    return [id_ for part, own in pieces for id_ in ([own] if own is not None else tokenizer.encode(part))]
