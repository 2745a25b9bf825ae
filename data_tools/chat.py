"""Split a conversation into pieces of text and special tokens, and mark the answers as trained.

The template renders the conversation (`megazero/data/conversation.py`).

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
from megazero.base.errors import UserError
from megazero.data.conversation import SpecialNames
from megazero.data.templates import BEGIN, END, RenderError, Template

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANSWERS = "assistant"  # the role of answers in transformers' templates
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
        pieces = [Piece(part, scored, id_) for text, scored in stretches for part, id_ in self._names.pieces(text)]
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
            messages.append(self._names.broken(message, refuse) | {"role": role})
        return messages, self._names.broken(record.get("tools"), refuse)

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
            end = re.search(rf"(?:{self._names.pattern})(?=\s*\Z)", text)
            size = len(text) if end is None else end.end()
            found += [(whole[at : len(before)], False), (text[:size], True), (text[size:], False)]
            at = len(behind)
        return [*found, (whole[at:], False)]

    @cached_property
    def _names(self) -> SpecialNames:
        return SpecialNames(self.specials)


def _marked(text: str) -> list[tuple[str, bool]]:
    """Split a rendered text into (text, is an answer): answers are between BEGIN and END. Raises RenderError."""
    parts = re.split(f"([{BEGIN}{END}])", text)
    if parts[1::2] != [BEGIN, END] * (len(parts) // 4):
        raise RenderError("{% generation %} blocks are nested or incomplete")
    return [(part, at % 2 == 1) for at, part in enumerate(parts[::2]) if part]
