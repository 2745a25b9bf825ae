"""Split a conversation into pieces of text and special tokens, and mark the answers as trained.

The template renders the conversation. A special token's name that the template writes becomes its id; a name inside a
message stays plain text, so that no message can end a turn, or begin one of another role, by writing the name. To tell
them apart, a mark that no text contains is put into every name in the strings of a record, and next to a part of a name
at either end of a string; it is removed after the search for names. (A role gets no mark: it must be a plain name.)

The template marks the answers by {% generation %} blocks. Without such blocks, an answer is the rendering of the
messages up to and including it, minus the rendering of the messages before it with the generation prompt
(`add_generation_prompt`): the text that a model has to generate. This is exact if each rendering is a prefix of the
next; a record for which it is not is refused. White space after the special token that ends an answer is not part of
the answer: the model need not generate it.

Prompt and answer are encoded separately, as in generation; so are special tokens and the text between them.
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
_ANSWERS = "assistant"  # the role of answers in transformers' templates
_BREAK = "\ufdd2"  # put into a name that is plain text; like BEGIN and END, a Unicode noncharacter
_BAD_RECORD = 227


@dataclass(frozen=True, kw_only=True)
class Chat(Select):
    """Choose the conversation of a record: the messages at `fields[0]`, and "tools".

    Attributes:
        template: renders the conversation.
        specials: ids of special tokens by their names.
    """

    template: Template
    specials: Mapping[str, int]

    def _taken(self, record: Any, refuse: Refuse) -> list[Piece]:
        """Return the pieces of a conversation; no pieces if it has no answer.

        Raises:
            UserError: what `refuse(reason)` returns, if there is no conversation; 227, the template cannot render it;
                226, the template itself is faulty.
        """
        try:
            messages, tools = self._given(record, refuse)
            stretches = self._stretches(messages, tools) if messages else []
        except RecursionError:
            raise refuse("its objects are nested too deeply") from None
        except RenderError as error:
            do = "repair the record, mark answers with {% generation %} in the template, or give --skip-bad"
            raise UserError(_BAD_RECORD, str(error), do, where=refuse("").where) from None
        pieces = [piece for text, scored in stretches for piece in self._pieces(text, scored)]
        return pieces if any(piece.scored for piece in pieces) else []

    def _given(self, record: Any, refuse: Refuse) -> tuple[list[dict[str, Any]], Any]:
        """Return (messages, tools) of a record, with marks in their names. Raises what `refuse(reason)` returns."""
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
        """Return the stretches of the rendered text as (text, is an answer). Raises RenderError."""
        whole = self.template.render(messages, tools, prompt=False)
        if self.template.marks_answers:
            return _marked(whole)
        found, at = [], 0
        for i in (i for i, message in enumerate(messages) if message["role"] == _ANSWERS):
            before = self.template.render(messages[:i], tools, prompt=True)
            behind = whole if i + 1 == len(messages) else self.template.render(messages[: i + 1], tools, prompt=False)
            if not (whole.startswith(behind) and behind.startswith(before) and at <= len(before)):
                what = f"message {i + 1} is not rendered as a prompt and its continuation, so its answer is unknown"
                raise RenderError(what)
            text = whole[len(before) : len(behind)]
            end = re.search(rf"(?:{self._name})(?=\s*\Z)", text)
            size = len(text) if end is None else end.end()
            found += [(whole[at : len(before)], False), (text[:size], True), (text[size:], False)]
            at = len(behind)
        return [*found, (whole[at:], False)]

    def _pieces(self, text: str, scored: bool) -> list[Piece]:
        """Split a stretch into pieces: the names of special tokens, and the text between them."""
        parts = re.split(f"({self._name})", text)
        return [
            Piece(part.replace(_BREAK, ""), scored, self.specials[part] if at % 2 else None)
            for at, part in enumerate(parts)
            if part
        ]

    def _broken(self, value: Any, refuse: Refuse) -> Any:
        """Return a value of a record with a mark after the first character of every name in its strings.

        A string that begins or ends with a part of a name also gets a mark there, because adjacent text could complete
        the name. White space at the ends is ignored, as templates strip it.
        """
        if isinstance(value, list):
            return [self._broken(each, refuse) for each in value]
        if isinstance(value, dict):
            return {self._apart(key): self._broken(each, refuse) for key, each in value.items()}
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
        return re.sub(f"(?s)(?=(?:{self._name}))(.)", rf"\1{_BREAK}", text)

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the proper prefixes and the proper suffixes of the names of special tokens."""
        cuts = [(name, at) for name in self.specials for at in range(1, len(name))]
        return tuple({name[:at] for name, at in cuts}), tuple({name[at:] for name, at in cuts})

    @cached_property
    def _name(self) -> str:
        """Return a pattern that matches the name of a special token; longer names match first."""
        names = sorted((name for name in self.specials if len(name) > 1), key=lambda name: (-len(name), name))
        return "|".join(map(re.escape, names)) or "(?!)"


def _marked(text: str) -> list[tuple[str, bool]]:
    """Split a rendered text into (text, is an answer): answers are between BEGIN and END. Raises RenderError."""
    parts = re.split(f"([{BEGIN}{END}])", text)
    if parts[1::2] != [BEGIN, END] * (len(parts) // 4):
        raise RenderError("{% generation %} blocks are nested or incomplete")
    return [(part, at % 2 == 1) for at, part in enumerate(parts[::2]) if part]
