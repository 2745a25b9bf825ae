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
        with path.open(encoding="utf-8") as file:
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
    """Return the record without its text, if it is an output. Raises ValueError: it has no prompt, or two."""
    if [isinstance(record.get("prompt"), str), isinstance(record.get("messages"), list)].count(True) != 1:
        got = ", ".join(f"{key}: {type(value).__name__}" for key, value in record.items()) or "no key"
        raise ValueError(f"expected either prompt, a text, or messages, a list; got {got}")
    return {key: value for key, value in record.items() if key != "text"}


def texts_in(out: Path, records: Sequence[Record]) -> int:
    """Return the number of prompts whose texts are in the output already; remove an incomplete line; make the file.

    Raises:
        UserError: 403, the output cannot be written; 229, a line of it is not one of these prompts.
    """
    do = "give another --out"
    try:
        with out.open("a+b") as file:
            file.seek(0)
            *lines, rest = file.read().split(b"\n")
            file.truncate(file.tell() - len(rest))
    except OSError as error:
        raise UserError(403, f"cannot be written: {error.strerror}", do, where=out) from None
    if len(lines) > len(records):
        raise UserError(229, f"has {len(lines):,} lines for {len(records):,} prompts", do, where=out)
    for number, (line, record) in enumerate(zip(lines, records, strict=False), 1):
        if not line.startswith(json.dumps(record, ensure_ascii=False)[:-1].encode()):
            raise UserError(229, f"line {number:,} is not the text of prompt {number:,}", do, where=out)
    return len(lines)
