"""Explain an out-of-memory error in one line: the size requested, the memory by category, options that save memory."""

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megazero.base.errors import UserError
from megazero.base.terminal import megabytes
from megazero.comm.grid import Grid

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_WORDS = ("can't allocate memory", "out of memory", "bad_alloc", "can't start new thread")
_SHOWN = 4  # categories


@contextmanager
def explain_out_of_memory(grid: Grid, savings: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Turn out-of-memory errors in the context into one line that says what holds how much.

    Args:
        savings: returns the bytes that each option would save, by its name.

    Raises:
        UserError: 330, in place of the errors of the libraries.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not _is_it(error):
            raise
        found = _ASKED.search(str(error))
        asked = f" when {megabytes(float(found[1]) * _UNITS[found[2]])} MB more were requested" if found else ""
        held = {category: held.now for category, held in grid.comm.ledger.bytes.items() if held.now}
        listed = ", ".join(f"{name} {megabytes(size)}" for name, size in _largest(held)[:_SHOWN])
        options = [f"{option} saves {megabytes(size)} MB" for option, size in _largest(savings())[:3]]
        do = ", ".join(options) or "more ranks"
        raise UserError(330, f"out of memory{asked}; in use: {listed} MB", do, rank=grid["world"].rank) from None


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda pair: -pair[1])


def _is_it(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(word in str(error) for word in _WORDS)
