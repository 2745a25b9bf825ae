"""Record what is sent as integers and what comes of it, and compare that with the independent reference.

Of each unit on each rank: the shard that it has of the first gather, and what that gather brings; its own gradients
before the first reductions, and its part of their sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.comm.collectives import Pending
from megazero.tools.certify.comparison import Difference
from megazero.tools.certify.rank import Coded, Results
from megazero.tools.certify.reference import Sent, codes_meaning, reduced_sums
from megazero.tools.certify.tolerances import ARRIVED, difference
from megazero.zero.unit import Unit

_REDUCTIONS = 3  # of each unit: what the first has lost comes with the second, what both have with the third


@dataclass(frozen=True)
class RecordedCodes:
    """What one rank has of units that are sent as integers.

    Attributes:
        stored: by "shard/UNIT", "gathered/UNIT", "sent/NUMBER/UNIT" and "summed/NUMBER/UNIT".
        how: each unit is sent.
    """

    stored: dict[str, Tensor] = field(default_factory=dict)
    how: dict[str, Coded] = field(default_factory=dict)


def record_codes(units: Sequence[Unit]) -> RecordedCodes:
    """Begin to record what of the units is sent as integers; return what fills up."""
    codes = RecordedCodes()
    for unit in units:
        shard, summing = unit.axes.shard, unit.gradients.summing
        if shard.size == 1:
            continue
        near = shard.size if summing.hops is None else summing.hops[0].size
        codes.how[unit.layout.name] = Coded(ranks=list(shard.ranks), near=near, accumulate=[])
        if unit.parameters.gathering.rounds:
            _record_gather(unit, codes)
        if summing.rounds:
            _record_sums(unit, codes)
    return codes


def _record_gather(unit: Unit, codes: RecordedCodes) -> None:
    start, install, name = unit.parameters.start_gather, unit.parameters.install, unit.layout.name

    def start_unshard() -> tuple[Tensor, Pending]:
        codes.stored.setdefault(f"shard/{name}", unit.resting.parameters.values.clone())
        return start()

    def install_first(whole: Tensor) -> None:
        codes.stored.setdefault(f"gathered/{name}", whole.clone())
        install(whole)

    unit.parameters.start_gather, unit.parameters.install = start_unshard, install_first  # type: ignore[method-assign]


def _record_sums(unit: Unit, codes: RecordedCodes) -> None:
    begin, end, name = unit.gradients.start_reduce, unit.gradients.end_reduce, unit.layout.name
    flags = codes.how[name]["accumulate"]

    def start_reduce(*, accumulate: bool) -> Pending:
        if len(flags) < _REDUCTIONS:
            assert unit.gradients.partial is not None, "there is something to reduce"
            codes.stored[f"sent/{len(flags)}/{name}"] = unit.gradients.partial.clone()
            flags.append(accumulate)
        return begin(accumulate=accumulate)

    def end_reduce() -> None:
        key = f"summed/{len(flags) - 1}/{name}"  # of the reduction that ends: the next has not begun
        if key not in codes.stored:
            codes.stored[key] = unit.gradients.own.clone()
        end()

    unit.gradients.start_reduce, unit.gradients.end_reduce = start_reduce, end_reduce  # type: ignore[method-assign]


def codes_apart(
    ranks: Sequence[Results], parameter_bits: int | None, gradient_bits: int | None, *, feedback: bool
) -> Iterator[Difference]:
    """Yield how far what came of each unit on each rank is from the reference."""
    for number, results in enumerate(ranks):
        for unit, how in results.coded.items():
            if number != how["ranks"][0]:
                continue
            own = [ranks[rank] for rank in how["ranks"]]
            pairs = []
            if parameter_bits is not None:
                meaning = torch.cat([codes_meaning(each.stored[f"shard/{unit}"], parameter_bits) for each in own])
                pairs += [("gather", [each.stored[f"gathered/{unit}"] for each in own], [meaning] * len(own))]
            if gradient_bits is not None:
                for k, sums in enumerate(reduced_sums(_sent(own, unit), gradient_bits, how["near"], feedback)):
                    pairs += [(f"reduction {k + 1}", [each.stored[f"summed/{k}/{unit}"] for each in own], sums)]
            for what, found, expected in pairs:
                for rank, mine, theirs in zip(how["ranks"], found, expected, strict=True):
                    where = f"{what} of {unit} on rank {rank}"
                    yield Difference("codes", _apart(mine, theirs), ARRIVED[mine.dtype], where)


def _sent(own: Sequence[Results], unit: str) -> list[list[Sent]]:
    """Return what each rank had before each reduction of a unit."""
    numbers = range(len(own[0].coded[unit]["accumulate"]))
    return [[Sent(each.stored[f"sent/{k}/{unit}"], each.coded[unit]["accumulate"][k]) for each in own] for k in numbers]


def _apart(found: Tensor, expected: Tensor) -> float:
    """Return the difference of what is finite; infinity if something else is finite."""
    expected = expected.to(found.dtype)
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    return difference(found[finite], expected[finite]) if finite.any() else 0.0
