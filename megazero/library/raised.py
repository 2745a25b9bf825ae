"""Bring an exception that a rank has raised to the process that launched it.

It goes as plain data: its class, its arguments, attributes and text. The launcher, from which the rank was forked, has
the class itself; one that it does not find or cannot make from these becomes a RuntimeError with the name and the text.
"""

import json
import sys
import time
import traceback
from collections.abc import Iterable
from typing import IO, Any

from megazero.base.errors import UserError
from megazero.library.plain import decoded, encoded


def keep(error: BaseException, rank: int, file: IO[bytes]) -> None:
    """Write an exception of this rank into a file, with its traceback as a note."""
    error.add_note(f"on rank {rank}:\n{''.join(traceback.format_exception(error))}")
    arguments = error.__reduce__()[1]  # an OSError's has the file, which its `args` has not
    values = {name: one for name, one in vars(error).items() if _is_plain(one)}
    plain = encoded([type(error).__module__, type(error).__qualname__, str(error), error.__notes__, values])
    file.write(json.dumps([time.monotonic(), plain, encoded(arguments) if _is_plain(arguments) else None]).encode())
    file.flush()


def first_kept(files: Iterable[IO[bytes]]) -> BaseException | None:
    """Return the exception that was raised first on any rank; None: no rank has kept one."""
    found: list[Any] = []
    for file in files:
        file.seek(0)
        if text := file.read():
            found.append(json.loads(text))
    if not found:
        return None
    _, plain, arguments = min(found, key=lambda one: one[0])
    return _made(decoded(plain), decoded(arguments))


def _is_plain(value: object) -> bool:
    try:
        encoded(value)
    except UserError:
        return False
    return True


def _made(plain: list[Any], arguments: Any) -> BaseException:
    module, name, text, notes, values = plain
    kind: Any = getattr(sys.modules.get(module), name, None)
    for make in (kind, lambda *given: kind.__new__(kind, *given)):  # its __init__ may take others than it passed on
        try:
            made = make(*arguments)
        except Exception:
            continue
        if str(made) == text:
            break
    else:
        made = RuntimeError(f"{name}: {text}")
    vars(made).update(values)
    made.__notes__ = notes
    return made
