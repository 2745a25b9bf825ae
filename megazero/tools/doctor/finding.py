"""A finding: one line about a machine.

A probe yields findings; a probe that fails yields a line too, never a traceback.

there     present, or measured
absent    not present; training does not need it, but something would be faster or possible with it
missing   not present, and training does not work without it
unknown   the probe failed; the text says why
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megazero.base.doing import doing
from megazero.base.errors import one_line

State = Literal["there", "absent", "missing", "unknown"]

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Finding:
    """One line about a machine.

    Attributes:
        name: the subject of the finding.
        text: the finding, or why there is none.
        do: how to add the missing thing; empty if there is nothing to do.
        values: the numbers of the line, in bytes, bytes/s, FLOP/s or seconds, as their names tell.
    """

    name: str
    text: str
    state: State = "there"
    do: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


def examine(name: str, probe: Callable[[], Iterable[Finding]], *, needed: bool = False) -> list[Finding]:
    """Return what a probe finds; if it fails, one finding called `name` with the reason.

    Args:
        needed: training needs the subject of the probe: it is `missing` after a failure, else `unknown`.
    """
    found: list[Finding] = []
    try:
        with doing(f"looking at: {name}"):
            found.extend(probe())
    except Exception as error:  # unusual machines may raise anything, and the other probes go on
        found.append(Finding(name, reason(error), "missing" if needed else "unknown"))
    return found


def reason(error: BaseException) -> str:
    """Return an exception as one line of text."""
    return one_line(f"{type(error).__name__}: {error}".removesuffix(": "))


def amount(value: float, unit: str) -> str:
    """Return a value with three digits and a decimal prefix: 12.3 GB/s, 4.56 TFLOP/s."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if value >= size), (1.0, ""))
    scaled = value / size
    return f"{scaled:.3g} {prefix}{unit}" if scaled < 999.5 else f"{scaled:.0f} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Return a duration in microseconds or milliseconds."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
