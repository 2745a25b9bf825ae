"""Turn a conversation into pieces of text and special tokens, and mark the answers as trained.

The template renders the conversation. Names of special tokens that the template writes become their ids; those that
stand in a message are text, like any other, so that no message can end a turn, or begin one of another role, by writing
the name. For that every name in the strings of a record, and a part of a name at a string's end, is broken by a mark
that no text has, and that is taken out again when names have been looked for. (A role is not: it must be a plain name.)

What is an answer says the template, by {% generation %} blocks. Where it has none, an answer is what the messages up to
it render to, after what those before it render to with the beginning of an answer (`add_generation_prompt`); so it is
what a model has to write when it is asked. That is exact where each rendering is the beginning of the next; a record
for which a template renders it otherwise is refused. White space after a special token that ends an answer is not part
of it: the model is not asked for more.

Prompt and answer are encoded apart, as they are when text is generated; so are special tokens and what is between them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from data_tools.selection import MISSING, Piece, Refuse, Select, value_at
from data_tools.templates import BEGIN, END, RenderError, Template
from megazero.base.errors import UserError

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANSWERS = "assistant"  # the role, as transformers' templates have it
_BREAK = "\ufdd2"  # inside a name that is text; like BEGIN and END no character
_BAD_RECORD = 227


@dataclass(frozen=True, kw_only=True)
class Chat(Select):
    """A conversation is taken of a record, under the one field.

    Attributes:
        template: renders it.
        specials: ids of special tokens by their names.
    """

    template: Template
    specials: Mapping[str, int]

    def _taken(self, record: Any, refuse: Refuse) -> list[Piece]:
        """Return a conversation in pieces; none where it has no answer.

        Raises:
            UserError: made by `refuse`: no conversation is there; 227, the template does not suit it; 226, the template
                is at fault.
        """
        try:
            messages, tools = self._given(record, refuse)
            stretches = self._stretches(messages, tools) if messages else []
        except RecursionError:
            raise refuse("its objects lie in each other too deep") from None
        except RenderError as error:
            do = "repair the record, mark answers by {% generation %} in the template, or give --skip-bad"
            raise UserError(_BAD_RECORD, str(error), do, where=refuse("").where) from None
        pieces = [piece for text, scored in stretches for piece in self._pieces(text, scored)]
        return pieces if any(piece.scored for piece in pieces) else []

    def _given(self, record: Any, refuse: Refuse) -> tuple[list[dict[str, Any]], Any]:
        """Return messages and tools of a record, with broken names. Raises what `refuse` makes."""
        found = value_at(record, self.fields[0]) if isinstance(record, dict) else record
        if not isinstance(record, dict) or not isinstance(found, list):
            got = f"no such key among {', '.join(record)[:60]}" if found is MISSING else type(found).__name__
            raise refuse(f'expected an object with a list of messages under "{self.fields[0]}", got {got}')
        messages = []
        for number, message in enumerate(found, start=1):
            if not isinstance(message, dict):
                raise refuse(f"message {number}: expected an object, got {type(message).__name__}")
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not _ROLE.fullmatch(role):
                raise refuse(f'message {number}: expected under "role" a name such as user, got {role!r:.40}')
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise refuse(f'message {number}: expected text under "content", got {type(content).__name__}')
            messages.append(self._broken(message, refuse) | {"role": role})
        return messages, self._broken(record.get("tools"), refuse)

    def _stretches(self, messages: list[dict[str, Any]], tools: Any) -> list[tuple[str, bool]]:
        """Return the rendered text in stretches, with whether each is an answer. Raises RenderError."""
        whole = self.template.render(messages, tools, prompt=False)
        if self.template.marks_answers:
            return _marked(whole)
        found, at = [], 0
        for i in (i for i, message in enumerate(messages) if message["role"] == _ANSWERS):
            before = self.template.render(messages[:i], tools, prompt=True)
            behind = whole if i + 1 == len(messages) else self.template.render(messages[: i + 1], tools, prompt=False)
            if not (whole.startswith(behind) and behind.startswith(before) and at <= len(before)):
                what = f"message {i + 1} is not rendered as a prompt and what follows, so its answer cannot be told"
                raise RenderError(what)
            text = whole[len(before) : len(behind)]
            end = re.search(rf"(?:{self._name})(?=\s*\Z)", text)
            size = len(text) if end is None else end.end()
            found += [(whole[at : len(before)], False), (text[:size], True), (text[size:], False)]
            at = len(behind)
        return [*found, (whole[at:], False)]

    def _pieces(self, text: str, scored: bool) -> list[Piece]:
        """Return a stretch in pieces: the names of special tokens, and the text between them."""
        parts = re.split(f"({self._name})", text)
        return [
            Piece(part.replace(_BREAK, ""), scored, self.specials[part] if at % 2 else None)
            for at, part in enumerate(parts)
            if part
        ]

    def _broken(self, value: Any, refuse: Refuse) -> Any:
        """Return a value of a record with a mark after the first character of every name in its strings.

        A mark at the end, or the beginning, of a string without its white space, which templates take off, breaks a
        name that text next to it would complete.
        """
        if isinstance(value, list):
            return [self._broken(each, refuse) for each in value]
        if isinstance(value, dict):
            return {self._apart(key): self._broken(each, refuse) for key, each in value.items()}
        if not isinstance(value, str):
            return value
        if odd := next((mark for mark in (BEGIN, END, _BREAK) if mark in value), None):
            raise refuse(f"U+{ord(odd):04X} stands in a text, which Unicode gives to no character")
        text, (heads, tails) = self._apart(value), self._parts
        body, start = text.strip(), len(text) - len(text.lstrip())
        first, last = _BREAK * body.startswith(tails), _BREAK * body.endswith(heads)
        return f"{text[:start]}{first}{body}{last}{text[start + len(body) :]}"

    def _apart(self, text: str) -> str:
        """Return a text with a mark in every name of a special token, also where names overlap."""
        return re.sub(f"(?s)(?=(?:{self._name}))(.)", rf"\1{_BREAK}", text)

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the beginnings of the names of special tokens, and their ends, each without the whole name."""
        cuts = [(name, at) for name in self.specials for at in range(1, len(name))]
        return tuple({name[:at] for name, at in cuts}), tuple({name[at:] for name, at in cuts})

    @cached_property
    def _name(self) -> str:
        """Return the pattern of a special token's name, the longest of several."""
        names = sorted((name for name in self.specials if len(name) > 1), key=lambda name: (-len(name), name))
        return "|".join(map(re.escape, names)) or "(?!)"


def _marked(text: str) -> list[tuple[str, bool]]:
    """Return a rendered text in stretches, those between BEGIN and END as answers. Raises RenderError."""
    parts = re.split(f"([{BEGIN}{END}])", text)
    if parts[1::2] != [BEGIN, END] * (len(parts) // 4):
        raise RenderError("{% generation %} blocks lie in each other, or are cut")
    return [(part, at % 2 == 1) for at, part in enumerate(parts[::2]) if part]
