"""Bring an exception that a rank has raised to the process that launched it, as it is."""

import contextlib
import pickle
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import IO, Any


def keep(error: BaseException, rank: int, file: IO[bytes]) -> None:
    """Write an exception of this rank into a file, with its traceback as a note.

    Where it cannot be pickled as it is, its class, arguments and attributes are; else a base class, or its text.
    """
    error.add_note(f"on rank {rank}:\n{''.join(traceback.format_exception(error))}")
    texts = (str(error),), {"__notes__": error.__notes__}
    ways: list[tuple[Any, ...]] = [(error,)]
    ways += [(kind, *of) for kind in type(error).__mro__ for of in ((error.args, vars(error)), texts)]
    for way in ways:
        with contextlib.suppress(Exception):
            _made(*pickle.loads(data := pickle.dumps(way)))  # as the caller will
            file.write(pickle.dumps((time.monotonic(), data)))
            file.flush()
            return


def first_kept(files: Iterable[IO[bytes]]) -> BaseException | None:
    """Return the exception that was raised first on any rank; None: no rank has kept one."""
    found: list[tuple[float, bytes]] = []
    for file in files:
        file.seek(0)
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # its rank was ended before or while it wrote
            found.append(pickle.loads(file.read()))
    return _made(*pickle.loads(min(found)[1])) if found else None


def _made(
    of: BaseException | type[BaseException],
    arguments: tuple[Any, ...] = (),
    attributes: Mapping[str, Any] | None = None,
) -> BaseException:
    if isinstance(of, BaseException):
        return of
    made = of.__new__(of, *arguments)  # its __init__ may take others
    vars(made).update(attributes or {})
    return made
