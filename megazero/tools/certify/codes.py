"""Record values that are sent as integers and the results, and compare these with the independent reference.

For each unit on each rank, record its shard before the first gather and the gathered values, its own gradients before
the first reductions, and its part of their sums.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megazero.tools.certify.comparison import Difference
from megazero.tools.certify.rank import Coded, Results
from megazero.tools.certify.reference import Sent, codes_meaning, reduced_sums
from megazero.tools.certify.tolerances import ARRIVED, difference
from megazero.zero.unit import Unit

_REDUCTIONS = 3  # of each unit: the second adds the residual of the first, the third that of both


def call_before(holder: object, method: str, other: Callable[..., object]) -> None:
    """Make an object call `other(*arguments)` before each call of its method."""
    right = getattr(holder, method)

    def both(*given: Any, **options: Any) -> Any:
        other(*given, **options)
        return right(*given, **options)

    object.__setattr__(holder, method, both)  # works on frozen objects too


def record_codes(units: Sequence[Unit], results: Results) -> None:
    """Start to record in `results.stored` what units send as integers, and what arrives.

    Keys: "shard/UNIT" and "gathered/UNIT" for the first gather; "sent/N/UNIT" (this rank's gradients) and
    "summed/N/UNIT" (its part of the sum) for reduction N = 0, 1, ...
    """
    for unit in units:
        shard, summing = unit.axes.shard, unit.gradients.summing
        if shard.size == 1:
            continue
        near = shard.size if summing.hops is None else summing.hops[0].size
        results.coded[unit.layout.name] = Coded(ranks=list(shard.ranks), near=near, accumulate=[])
        if unit.parameters.gathering.rounds:
            _record_gather(unit, results.stored)
        if summing.rounds:
            _record_sums(unit, results.stored, results.coded[unit.layout.name]["accumulate"])


def _record_gather(unit: Unit, stored: dict[str, Tensor]) -> None:
    name = unit.layout.name

    def note_shard() -> None:
        stored.setdefault(f"shard/{name}", unit.resting.parameters.values.clone())

    call_before(unit.parameters, "start_gather", note_shard)
    call_before(unit.parameters, "install", lambda whole: stored.setdefault(f"gathered/{name}", whole.clone()))


def _record_sums(unit: Unit, stored: dict[str, Tensor], flags: list[bool]) -> None:
    name = unit.layout.name

    def note_own(*, accumulate: bool) -> None:
        if len(flags) < _REDUCTIONS:
            assert unit.gradients.partial is not None, "there is something to reduce"
            stored[f"sent/{len(flags)}/{name}"] = unit.gradients.partial.clone()
            flags.append(accumulate)

    def note_sum() -> None:  # the sum of the reduction that ends: the next has not begun
        stored.setdefault(f"summed/{len(flags) - 1}/{name}", unit.gradients.own.clone())

    call_before(unit.gradients, "start_reduce", note_own)
    call_before(unit.gradients, "end_reduce", note_sum)


def codes_apart(
    ranks: Sequence[Results], parameter_bits: int | None, gradient_bits: int | None, *, feedback: bool
) -> Iterator[Difference]:
    """Yield for each unit and rank how far its gathered values, and its sums, are from the reference's.

    Bits are None for values that are not sent as integers. `feedback`: errors are added to the next gradients sent.
    """
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
    """Return each rank's gradients before each reduction of a unit: [reduction][rank]."""
    numbers = range(len(own[0].coded[unit]["accumulate"]))
    return [[Sent(each.stored[f"sent/{k}/{unit}"], each.coded[unit]["accumulate"][k]) for each in own] for k in numbers]


def _apart(found: Tensor, expected: Tensor) -> float:
    """Return the `difference` of the finite elements; infinity if not the same elements of both are finite."""
    expected = expected.to(found.dtype)
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    return difference(found[finite], expected[finite]) if finite.any() else 0.0
