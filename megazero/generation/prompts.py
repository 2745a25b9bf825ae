"""Read prompts from a file of JSON lines, and compare an output file with them. Imports no torch.

A line of the output is the line of the prompt with the key `text`. The output may be incomplete: a command that was
interrupted goes on after the last complete line.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.base.errors import UserError
from megazero.base.reading import parse_object

Record = dict[str, Any]  # a line of a file, with a prompt
_DO = 'give lines such as {"prompt": "text"} or {"messages": [...]}'


def read_prompts(path: Path) -> list[Record]:
    """Return the lines of a file that are not empty. Raises UserError 229: unreadable, or a line without a prompt."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = [*file]  # `splitlines` would also cut at separators inside of a text
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}"
        raise UserError(229, what, _DO, where=path) from None
    found = list[Record]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_with_prompt(parse_object(line)))
            except ValueError as error:
                raise UserError(229, f"line {number:,}: {error}", _DO, where=path) from None
    return found


def _with_prompt(record: Record) -> Record:
    """Return the record without its text, if it has one. Raises ValueError: no prompt, or it cannot be written."""
    messages = record.get("messages")
    talks = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
    if isinstance(record.get("prompt"), str) == talks:
        got = ", ".join(f"{key}: {type(value).__name__}" for key, value in record.items()) or "no key"
        raise ValueError(f"expected either prompt, a text, or messages, a list of objects; got {got}")
    _head(record)
    return {key: value for key, value in record.items() if key != "text"}


def _head(record: Record) -> bytes:
    """Return the beginning of a record's line in the output, up to its text. Raises ValueError: not to be written."""
    return json.dumps({**record, "text": ""}, ensure_ascii=False, allow_nan=False)[:-2].encode()


def texts_in(out: Path, records: Sequence[Record]) -> int:
    """Return the number of prompts whose texts are in the output already; remove an incomplete line; make the file.

    Raises:
        UserError: 403, the output cannot be written; 229, a line of it is not one of these prompts.
    """
    do = "give another --out"
    try:
        *lines, rest = (out.read_bytes() if out.is_file() else b"").split(b"\n")
        if len(lines) + bool(rest) > len(records):
            raise UserError(229, f"has {len(lines):,} lines for {len(records):,} prompts", do, where=out)
        for number, (line, head) in enumerate(zip([*lines, rest], map(_head, records), strict=False), 1):
            # The rest may end before the text.
            if not line.startswith(head) and not (number > len(lines) and head.startswith(line)):
                raise UserError(229, f"line {number:,} is not the text of prompt {number:,}", do, where=out)
        with out.open("ab") as file:
            if rest:
                file.truncate(sum(len(line) + 1 for line in lines))
    except OSError as error:
        raise UserError(403, f"cannot be written: {error.strerror or error}", do, where=out) from None
    return len(lines)
