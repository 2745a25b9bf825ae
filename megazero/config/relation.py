"""Define a relation between options: a condition with the text that is printed if it is broken."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]  # "section.key" of a resolved config: value


_OPTION = re.compile(r"[a-z_]+(?:\.[a-z_]+)+|\bstages\b")


@dataclass(frozen=True)
class Relation:
    """A condition between options, mostly an equation of sizes. A broken one is error 106.

    Attributes:
        equation: as printed; contains the names of its options.
        holds: returns True if the equation holds.
        do: advice on what to change.
        got: returns the values for the message; None: list the value of each option.
    """

    code = 106
    equation: str
    holds: Callable[[Values], bool]
    do: str
    got: Callable[[Values], str] | None = None

    @property
    def options(self) -> list[str]:
        """Return the options in the equation."""
        return _OPTION.findall(self.equation)

    def broken(self, values: Values) -> str:
        """Return a message: the equation and the values that break it."""
        got = self.got(values) if self.got else ", ".join(f"{key} {values[key]}" for key in self.options)
        return f"{self.equation} is broken: {got}"

    def __str__(self) -> str:
        return f"needs {self.equation}"


def divides(small: str, large: str, do: str, condition: str = "") -> Relation:
    """Return the relation "`small` divides `large`"; if `condition` names an option, only where that is true."""

    def holds(v: Values) -> bool:
        return (bool(condition) and not v[condition]) or v[small] is None or v[large] % v[small] == 0

    given = f" with {condition}" if condition else ""
    return Relation(
        f"{large} % {small} == 0{given}", holds, do, lambda v: f"{v[large]} % {v[small]} = {v[large] % v[small]}"
    )
