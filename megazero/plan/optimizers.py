"""The optimizers: the values that each keeps for an element, and which of them updates a parameter."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum",),
    "lion": ("exp_avg",),
    "sgd": ("velocity",),  # a sum, and muon's is an average
}
AVERAGE = "average"  # of the parameter, kept with the state of any optimizer
WHOLE = ("muon",)  # they need whole matrices, and leave other parameters to adamw


@dataclass(frozen=True)
class Optimizers:
    """Which optimizer updates which parameter.

    Attributes:
        name: the optimizer of parameters whose group names none.
        groups: for each group its pattern of parameter names, and its optimizer or None; the first match counts.
        averages: each keeps averages of its parameters.
    """

    name: str = "adamw"
    groups: tuple[tuple[str, str | None], ...] = ()
    averages: bool = False

    def states(self, optimizer: str) -> tuple[str, ...]:
        """Return the names of the values that an optimizer keeps for an element."""
        return STATES[optimizer] + (AVERAGE,) * self.averages

    def of(self, parameter: str, *, hidden: bool) -> tuple[str, int]:
        """Return the optimizer of a parameter, and the number of the group that it is in; -1: in none.

        Args:
            hidden: it is the weight of a matrix product inside of a block.
        """
        group = next((i for i, (pattern, _) in enumerate(self.groups) if fnmatchcase(parameter, pattern)), -1)
        asked = (self.groups[group][1] if group >= 0 else None) or self.name
        return ("adamw" if asked in WHOLE and not hidden else asked), group

    @property
    def whole(self) -> bool:
        """Return whether any of them needs whole matrices."""
        return not {*self.names}.isdisjoint(WHOLE)

    @property
    def names(self) -> list[str]:
        """Return all optimizers that may update a parameter, in the order of `STATES`."""
        asked = {self.name, *(name for _, name in self.groups)}
        return [name for name in STATES if name in asked or (name == "adamw" and asked & {*WHOLE})]

    @property
    def kinds(self) -> list[str]:
        """Return the names of all values that are kept for some elements."""
        return list(dict.fromkeys(kind for name in self.names for kind in self.states(name)))


ADAMW = Optimizers()


def order(optimizer: str, group: int) -> tuple[bool, str, int]:
    """Return the place of a parameter's optimizer and group in a unit's flat buffer, as a key for sorting."""
    return optimizer not in WHOLE, optimizer, group
