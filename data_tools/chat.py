"""Turn a conversation into runs of text and special tokens, of which the answers are trained on.

The template renders the conversation. Names of special tokens that the template writes become their ids; those that
stand in a message are text, like any other, so that nobody can end a turn, or begin one as somebody else, by writing
the name. For that every name in the strings of a record, and a part of a name at a string's end, is broken by a mark
that no text has, and that is taken out again when names have been looked for. (A role is not: it must be a plain name.)

What is an answer says the template, by {% generation %} blocks. Where it has none, an answer is what the messages up to
it render to, behind what those before it render to with the beginning of an answer (`add_generation_prompt`); so it is
what a model has to write when it is asked. That is exact where each rendering is the beginning of the next; a record
for which a template renders it otherwise is refused. White space behind a special token that ends an answer is not part
of it: nobody asks the model for more.

Prompt and answer are encoded apart, as they are when text is generated; so are special tokens and what is between them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from data_tools.marks import BEGIN, BREAK, END
from data_tools.selection import MISSING, Condition, Refuse, Run, passes, value_at
from data_tools.templates import RenderError, Template
from megazero.base.errors import UserError

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANSWERS = "assistant"  # the role, as transformers' templates have it
_BAD_RECORD = 227


@dataclass(frozen=True)
class Chat:
    """What is taken of a record that is a conversation.

    Attributes:
        template: renders it.
        specials: ids of special tokens by their names.
        field: path of the messages.
        where: conditions that all must hold.
    """

    template: Template
    specials: Mapping[str, int]
    field: str
    where: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        rendered_by = (self.template.source, sorted(self.template.names.items()), sorted(self.specials.items()))
        return " ".join([repr(rendered_by), self.field, *map(str, self.where)])

    @property
    def paths(self) -> list[str]:
        """Every path that is looked at, once."""
        return list(dict.fromkeys([self.field, *(condition.path for condition in self.where)]))

    def runs(self, record: Any, refuse: Refuse) -> list[Run] | None:
        """Return a conversation as runs; none where it has no answer; None: a condition does not hold.

        Raises:
            UserError: made by `refuse`: no conversation is there; 227, the template does not suit it; 226, the template
                is at fault.
        """
        if not passes(self.where, record, refuse):
            return None
        try:
            messages, tools = self._given(record, refuse)
            size = len(str(messages)) + len(str(tools))
        except RecursionError:
            raise refuse("its objects lie in each other too deep") from None
        if not messages:
            return []
        try:
            with self.template.bounded(size):
                stretches = self._stretches(messages, tools)
            runs = [run for text, scored in stretches for run in self._runs(text, scored)]
            for run in runs:
                run.text.encode()
        except RenderError as error:
            what, do = f"the template raises: {error}", "mend the record or the template, or give --skip-bad"
            raise UserError(_BAD_RECORD, what, do, where=refuse("").where) from None
        except _OtherwiseError as error:
            what = f"message {error.message} is not rendered as a prompt and what follows, so its answer cannot be told"
            do = "mark answers by {% generation %} in the template, or give --skip-bad"
            raise UserError(_BAD_RECORD, what, do, where=refuse("").where) from None
        except UnicodeEncodeError as error:
            raise refuse(f"character {error.start:,} of a text is half a surrogate pair, not a character") from error
        return runs if any(run.scored for run in runs) else []

    def _given(self, record: Any, refuse: Refuse) -> tuple[list[dict[str, Any]], Any]:
        """Return messages and tools of a record, with broken names. Raises what `refuse` makes."""
        found = value_at(record, self.field) if isinstance(record, dict) else record
        if not isinstance(record, dict) or not isinstance(found, list):
            got = f"no such key among {', '.join(record)[:60]}" if found is MISSING else type(found).__name__
            raise refuse(f'expected an object with a list of messages under "{self.field}", got {got}')
        messages = []
        for number, message in enumerate(found, start=1):
            if not isinstance(message, dict):
                raise refuse(f"message {number}: expected an object, got {type(message).__name__}")
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not _ROLE.fullmatch(role):
                raise refuse(f'message {number}: expected under "role" a name such as user, got {role!r:.40}')
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise refuse(f'message {number}: expected text under "content", got {type(content).__name__}')
            given = self._guard.value(message, refuse) | {"role": role}
            if content is not None:
                given["content"] = self._guard.text(content, refuse, inside=True)
            messages.append(given)
        return messages, self._guard.value(record.get("tools"), refuse)

    def _stretches(self, messages: list[dict[str, Any]], tools: Any) -> list[tuple[str, bool]]:
        """Return the rendered text in stretches, with whether each is an answer.

        Raises:
            RenderError, _OtherwiseError: the template does not suit the record.
        """
        whole = self.template.render(messages, tools, prompt=False)
        if self.template.marks_answers:
            return _marked(whole)
        found, at = [], 0
        for i in (i for i, message in enumerate(messages) if message["role"] == _ANSWERS):
            before = self.template.render(messages[:i], tools, prompt=True)
            behind = whole if i + 1 == len(messages) else self.template.render(messages[: i + 1], tools, prompt=False)
            if not (whole.startswith(behind) and behind.startswith(before) and at <= len(before)):
                raise _OtherwiseError(i + 1)
            text = whole[len(before) : len(behind)]
            end = self._ends.search(text)
            size = len(text) if end is None else end.end()
            found += [(whole[at : len(before)], False), (text[:size], True), (text[size:], False)]
            at = len(behind)
        return [*found, (whole[at:], False)]

    def _runs(self, text: str, scored: bool) -> list[Run]:
        """Return a stretch as runs: the names of special tokens, and the text between them."""
        parts = self._guard.names.split(text)
        runs = [Run(part, scored, self.specials[part] if at % 2 else None) for at, part in enumerate(parts) if part]
        return [Run(run.text.replace(BREAK, ""), run.scored, run.id) for run in runs]

    @cached_property
    def _guard(self) -> "_Guard":
        return _Guard([name for name in self.specials if len(name) > 1])

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """Return what finds a special token with nothing but white space behind it."""
        return re.compile(rf"{self._guard.names.pattern}(?=\s*\Z)")


class _OtherwiseError(Exception):
    """An error for a message whose rendering changes with what follows it."""

    def __init__(self, message: int):
        super().__init__(message)
        self.message = message


def _marked(text: str) -> list[tuple[str, bool]]:
    """Return a rendered text in stretches, those between BEGIN and END as answers. Raises RenderError."""
    found: list[tuple[str, bool]] = []
    inside = False
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part in (BEGIN, END):
            if inside != (part == END):
                raise RenderError("{% generation %} blocks lie in each other, or are cut")
            inside = not inside
        elif part:
            found.append((part, inside))
    if inside:
        raise RenderError("a {% generation %} block is cut")
    return found


class _Guard:
    """Breaks the names of special tokens in the strings of a record, so that they are text where they are rendered.

    Attributes:
        names: finds a name, the longest of several; a group, as `split` wants it.
    """

    def __init__(self, names: Sequence[str]):
        either = "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name)))) or "(?!)"
        self.names = re.compile(f"({either})")
        self._begins = re.compile(f"(?=(?:{either}))(.)", re.DOTALL)  # also of names that overlap
        self._beginnings = {name[:size] for name in names for size in range(1, len(name))}
        self._endings = {name[size:] for name in names for size in range(1, len(name))}
        self._names, self._longest = names, max(map(len, names), default=1)

    def value(self, value: Any, refuse: Refuse) -> Any:
        """Return a value with its strings broken, at any depth. Raises what `refuse` makes."""
        if isinstance(value, str):
            return self.text(value, refuse)
        if isinstance(value, list):
            return [self.value(each, refuse) for each in value]
        if isinstance(value, dict):
            return {self._begins.sub(rf"\1{BREAK}", key): self.value(each, refuse) for key, each in value.items()}
        return value

    def text(self, text: str, refuse: Refuse, *, inside: bool = False) -> str:
        """Return a text whose names are broken, also those that what is before or behind it would complete.

        Args:
            inside: also where all of it is the inside of a name. (Only of messages: a template compares other values.)

        Raises:
            UserError: made by `refuse`: it has a character that is none.
        """
        if odd := next((mark for mark in (BEGIN, END, BREAK) if mark in text), None):
            raise refuse(f"U+{ord(odd):04X} stands in a text, which Unicode gives to no character")
        text = self._begins.sub(rf"\1{BREAK}", text)
        body = text.strip()  # as templates do
        sizes = range(1, min(self._longest, len(body) + 1))
        start = len(text) - len(text.lstrip())
        if any(body[-size:] in self._beginnings for size in sizes):
            text = text[: start + len(body)] + BREAK + text[start + len(body) :]
        middle = inside and body and any(body in name for name in self._names)
        if middle or any(body[:size] in self._endings for size in sizes):
            text = text[:start] + BREAK + text[start:]
        return text
