"""Compare what the ranks of a layout computed with one process, parameter by parameter (measure: `tolerances.py`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megazero.tools.certify.rank import Results
from megazero.tools.certify.tolerances import Tolerance, difference, weight_differences


@dataclass(frozen=True)
class Compared:
    """The largest relative differences of a layout; `fault` is what is wrong, if it is.

    Attributes:
        bitwise: everything is equal bit for bit.
        times: of each measure, how many times its tolerance was found; infinite where nothing may differ.
    """

    bitwise: bool = False
    loss: float = 0.0
    norm: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    fault: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)


def times_of(value: float, tolerance: float) -> float:
    """Return how many times its tolerance a difference is."""
    if value <= tolerance:
        return value / tolerance if tolerance else 0.0
    return value / tolerance if tolerance and value == value else math.inf


def compare(ranks: Sequence[Results], alone: Results, heads: int, kv_heads: int, tolerance: Tolerance) -> Compared:
    """Compare all ranks' results with those of one process, whose every tensor is whole.

    Args:
        heads, kv_heads: the model's.
    """
    found, snapshots = _Differences(), list(alone.snapshots())
    for number, rank in enumerate(ranks):
        for step, (loss, norm) in enumerate(zip(alone.losses, alone.norms, strict=True)):
            found.see("loss", step, "loss", number, difference([rank.losses[step]], [loss]))
            # From the second step on it is the norm at weights that have gone apart themselves.
            kind = "norm" if step == 0 else "later norm"
            skipped = alone.skips[step][0] and rank.skips[step][0]  # the norm of neither is a number
            apart = 0.0 if skipped else difference([rank.norms[step]], [norm])
            found.see(kind, step, "gradient norm", number, apart)
        for kind, step, theirs in snapshots:
            mine = {name: _in_place(part, theirs[name], rank.rows.get(name)) for name, part in rank.tensors(kind)}
            same = {name: theirs[name] for name in mine}
            for name, apart in weight_differences(mine, same, heads=heads, kv_heads=kv_heads).items():
                kind_of = kind.partition("/")[0]
                # Adam's first steps divide by little more than the gradient itself: what is held are the last weights.
                if kind_of == "weight" and step + 1 < len(alone.losses):
                    kind_of = "earlier weight"
                found.see(kind_of, step, name, number, apart)
    worst = found.worst
    limits = {"initial": 0.0, "loss": tolerance.loss, "norm": tolerance.norm, "later norm": tolerance.weights}
    limits |= {"gradient": tolerance.gradients, "weight": tolerance.weights, "earlier weight": tolerance.weights}
    return Compared(
        all(value == 0 for value in worst.values()),
        worst["loss"],
        worst["norm"],
        worst["gradient"],
        worst["weight"],
        found.first_beyond(limits),
        {_WORDS[kind]: times_of(worst[kind], limits[kind]) for kind in _WORDS if kind in worst},
    )


def _in_place(part: Tensor, whole: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """Return one process' tensor with a rank's part of it in its place, to measure it on the scale of the whole."""
    if rows is None:
        return part
    mine = whole.clone()
    mine[rows[0] : rows[0] + rows[1]] = part
    return mine


_WORDS = {
    "initial": "initial weights",
    "loss": "loss",
    "norm": "gradient norm",
    "later norm": "later norms",
    "gradient": "first gradients",
    "weight": "weights",
}


class _Differences:
    """The worst difference of each kind, and where each was seen, in the order in which a step computes."""

    _ORDER = ("initial", "loss", "gradient", "norm", "later norm", "earlier weight", "weight")

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}
        self._seen: list[tuple[int, int, int, str, str, float]] = []

    def see(self, kind: str, step: int, name: str, rank: int, apart: float) -> None:
        self.worst[kind] = apart if apart != apart else max(self.worst.get(kind, 0.0), apart)
        self._seen.append((step, self._ORDER.index(kind), rank, kind, name, apart))

    def first_beyond(self, limits: dict[str, float]) -> str | None:
        """Return where something first left its limit; of weights, those of earlier steps tell where it began."""
        beyond = [seen for seen in self._seen if seen[3] != "earlier weight" and not seen[5] <= limits[seen[3]]]
        names = {seen[4] for seen in beyond}
        began = [seen for seen in self._seen if seen[3] == "earlier weight" and seen[4] in names]
        for step, _, rank, kind, name, apart in sorted(beyond + began, key=lambda seen: seen[:3]):
            if not apart <= limits[kind]:
                words = {"initial": "initial ", "gradient": "gradient of "}
                what = words.get(kind, "weight " if kind.endswith("weight") else "")
                return f"step {step + 1}: {what}{name} of rank {rank}, {apart:.1e} > {limits[kind]:.0e}"
        return None
