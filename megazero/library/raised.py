"""Bring an exception that a rank has raised to the process that launched it, as it is.

It goes as plain data: the names of its classes, its arguments, text, attributes and notes. The launcher, from which the
rank was forked, has most classes itself; where it has not, it takes the nearest base class that it has.
"""

import json
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import IO, Any

from megazero.base.errors import UserError
from megazero.library.plain import decoded, encoded


def keep(error: BaseException, rank: int, file: IO[bytes]) -> None:
    """Write an exception of this rank into a file, with its traceback as a note."""
    error.add_note(f"on rank {rank}:\n{''.join(traceback.format_exception(error))}")
    file.write(json.dumps([time.monotonic(), _plain(error)]).encode())
    file.flush()


def first_kept(files: Iterable[IO[bytes]]) -> BaseException | None:
    """Return the exception that was raised first on any rank; None: no rank has kept one."""
    found: list[tuple[float, Any]] = []
    for file in files:
        file.seek(0)
        try:
            at, plain = json.loads(file.read())
        except ValueError:  # its rank was ended before it wrote, or while it did
            continue
        found.append((at, plain))
    return _made(min(found, key=lambda one: one[0])[1]) if found else None


def _plain(error: BaseException) -> dict[str, Any]:
    kinds = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__]
    inner = [_plain(one) for one in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    arguments = [error.message] if isinstance(error, BaseExceptionGroup) else list(error.args)
    if isinstance(error, OSError):
        arguments = list(error.__reduce__()[1])  # with the file, which `args` has not
    held = {name: plain for name, one in vars(error).items() if (plain := _encoded(one)) is not None}
    return {"kinds": kinds, "arguments": _encoded(arguments), "text": str(error), "inner": inner, "held": held}


def _encoded(value: Any) -> Any:
    """Return a value as plain data; None: it is none."""
    try:
        return encoded(value)
    except UserError:
        return None


def _made(plain: dict[str, Any]) -> BaseException:
    text, inner = plain["text"], [[_made(one) for one in plain["inner"]]] if plain["inner"] else []
    given = [] if plain["arguments"] is None else [[*decoded(plain["arguments"]), *inner]]
    for kind in _classes(plain["kinds"]):
        for arguments in (*given, [text]):
            for make in (kind, lambda *given, kind=kind: kind.__new__(kind, *given)):  # its __init__ may take others
                try:
                    made = make(*arguments)
                except Exception:  # whatever a class of the user's raises
                    continue
                if str(made) == text:
                    vars(made).update(decoded(plain["held"]))
                    return made
    raise AssertionError("BaseException takes any text")


def _classes(names: Iterable[tuple[str, str]]) -> Iterator[type[BaseException]]:
    """Yield the classes of some names that this process has."""
    for module, name in names:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            yield found
