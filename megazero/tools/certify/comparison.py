"""Compare the results and states of a layout's ranks with one process, parameter by parameter.

    samples      of each step: each sample once over the data axis, and equal on all ranks that share a data rank
    skipped      of each step: whether it changed nothing, and the loss scale after it
    computed     losses, gradient norms, the first step's gradients, the weights before and after each step
    held once    the ranks would save every element of every parameter exactly once
    replicas     the weights that every rank computes with are those that would be saved, in its dtype
    held         the optimizers' state, and the update (the weights after all steps minus the first ones, in the
                 optimizer's precision): each parameter as a whole; and the size of the update of all matrices, and of
                 all vectors
    codes        values sent as integers (`codes.py`)

Samples, skipped steps, held once and replicas are exact. `tolerances.py` has the measure of the others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.tools.certify.rank import Results
from megazero.tools.certify.tolerances import (
    Tolerance,
    difference,
    size_difference,
    state_distances,
    weight_differences,
)

Heads = tuple[int, int]  # the model's numbers of query heads and of key-value heads
State = Mapping[str, Mapping[str, Tensor]]  # [kind of tensor][parameter], flat
_STATES = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "momentum": "momentum"}
_STATES |= {"velocity": "velocity", "average": "average"}
_EARLIER = "earlier weights"  # no fault by themselves: they show where a weight began to differ
_NOTED = {"initial": ("initial weights", "initial "), "gradient": ("first gradients", "gradient of ")}
_ORDER = ("initial weights", "loss", "first gradients", "gradient norm", "later norms", _EARLIER, "weights")


@dataclass(frozen=True)
class Difference:
    """The difference between a value and its expected value.

    Attributes:
        measure: what is compared, in words.
        what: where it was found, in words.
        step, rank: where the value was computed.
        name: name of the parameter, if it is one.
    """

    measure: str
    value: float
    tolerance: float
    what: str
    step: int = 0
    rank: int = 0
    name: str = ""

    @property
    def beyond(self) -> bool:
        """Return whether the difference exceeds its tolerance; NaN always does."""
        return not self.value <= self.tolerance

    @property
    def times(self) -> float:
        """Return the difference divided by its tolerance. With tolerance 0: 0 if nothing differs, else infinity."""
        if self.value <= self.tolerance:
            return self.value / self.tolerance if self.tolerance else 0.0
        return self.value / self.tolerance if self.tolerance and self.value == self.value else math.inf

    @property
    def line(self) -> str:
        """Return the difference and its tolerance as text."""
        return f"{self.what}, {self.value:.1e} > {self.tolerance:.0e}"


@dataclass(frozen=True)
class Compared:
    """The differences of a layout.

    Attributes:
        bitwise: everything is equal bit for bit.
        fault: a text about the first difference beyond its tolerance, or why the layout failed; None: no fault.
        worst: the largest relative difference of each measure.
        times: the difference of each measure divided by its tolerance; infinite if nothing may differ and it does.
    """

    bitwise: bool = False
    fault: str | None = None
    worst: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)


def compare(
    ranks: Sequence[Results], alone: Results, heads: Heads, tolerance: Tolerance, codes: Iterable[Difference] = ()
) -> Compared:
    """Compare all ranks with one process, which has every tensor whole.

    Args:
        codes: the differences of values that were sent as integers.
    """
    found = list(_computed(ranks, alone, heads, tolerance))
    exact = {"samples": wrong_sample(ranks, alone), "skipped steps": wrong_skip(ranks, alone)}
    lines = [*exact.values(), _first_beyond(found)]
    exact["held once"], held = not_held_once(ranks), list[Difference]()
    if exact["held once"] is None and alone.held:
        state = _assembled(ranks)
        exact["replicas"] = stale_replica(ranks, state["weight"])
        held += _held(state, _assembled([alone]), alone.shapes, heads, tolerance)
    held += codes
    lines += [exact["held once"], exact.get("replicas"), *(each.line for each in held if each.beyond)]
    found += held
    worst: dict[str, Difference] = {}
    for each in found:
        before = worst.setdefault(each.measure, each)
        if (each.times, each.value) > (before.times, before.value):  # times are 0 with an infinite tolerance
            worst[each.measure] = each
    bitwise = all(each.value == 0 for each in found) and not any(exact.values())
    worst.pop(_EARLIER, None)
    times = {measure: each.times for measure, each in worst.items()}
    times |= {measure: math.inf if line else 0.0 for measure, line in exact.items()}
    fault = next((line for line in lines if line), None)
    return Compared(bitwise, fault, {measure: each.value for measure, each in worst.items()}, times)


def _first_beyond(computed: Sequence[Difference]) -> str | None:
    """Return the line of the earliest difference beyond its tolerance; None: there is none.

    Weights of earlier steps count only for parameters that are beyond a tolerance in another measure too.
    """
    beyond = [each for each in computed if each.beyond]
    last = {each.name for each in beyond if each.measure != _EARLIER}
    counted = [each for each in beyond if each.measure != _EARLIER or each.name in last]
    first = min(counted, key=lambda each: (each.step, _ORDER.index(each.measure), each.rank), default=None)
    return first.line if first is not None else None


def _computed(ranks: Sequence[Results], alone: Results, heads: Heads, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the differences of the values that each rank computed."""
    limits = {"initial weights": 0.0, "loss": tolerance.loss, "gradient norm": tolerance.norm}
    limits |= {"first gradients": tolerance.gradients}

    def found(measure: str, value: float, what: str, step: int, rank: int, name: str = "") -> Difference:
        where = f"step {step + 1}: {what} of rank {rank}"
        return Difference(measure, value, limits.get(measure, tolerance.weights), where, step, rank, name)

    snapshots, last = list(alone.snapshots()), len(alone.losses) - 1
    for number, rank in enumerate(ranks):
        for step, (loss, norm) in enumerate(zip(alone.losses, alone.norms, strict=True)):
            yield found("loss", difference([rank.losses[step]], [loss]), "loss", step, number)
            skipped = alone.skips[step][0] and rank.skips[step][0]  # neither norm is finite
            apart = 0.0 if skipped else difference([rank.norms[step]], [norm])
            # From the second step on, norms are computed at weights that differ already.
            yield found("later norms" if step else "gradient norm", apart, "gradient norm", step, number)
        for kind, step, theirs in snapshots:
            mine = {name: _in_place(part, theirs[name], rank.rows.get(name)) for name, part in rank.tensors(kind)}
            same = {name: theirs[name] for name in mine}
            measure, what = _NOTED.get(kind, ("weights" if step == last else _EARLIER, "weight "))
            how = {"heads": heads[0], "kv_heads": heads[1], "signs": tolerance.signs and kind.startswith("weight")}
            for name, apart in weight_differences(mine, same, **how).items():
                yield found(measure, apart, what + name, step, number, name)


def _in_place(part: Tensor, whole: Tensor, rows: Sequence[int] | None) -> Tensor:
    """Return a copy of `whole` (one process's) with `rows` (first, count) replaced by a rank's `part`; None: `part`."""
    if rows is None:
        return part
    mine = whole.clone()
    mine[rows[0] : rows[0] + rows[1]] = part
    return mine


def wrong_skip(ranks: Sequence[Results], alone: Results) -> str | None:
    """Describe the first step that only a rank or only one process skipped, or after which loss scales differ."""
    for step, expected in enumerate(alone.skips):
        for number, rank in enumerate(ranks):
            if rank.skips[step] != expected:
                both = rank.skips[step], expected
                got, right = (f"{'skipped' if skipped else 'updated'}, loss scale {scale:g}" for skipped, scale in both)
                return f"step {step + 1}: rank {number} has {got}, expected {right}"
    return None


def wrong_sample(ranks: Sequence[Results], alone: Results) -> str | None:
    """Describe the first step whose samples differ from those of one process, or among ranks of one data rank."""
    for step, expected in enumerate(alone.samples):
        readers: dict[int, list[tuple[int, str]]] = {}
        for number, rank in enumerate(ranks):
            own = rank.samples[step]
            if sorted(readers.setdefault(rank.data_rank, own)) != sorted(own):
                return f"step {step + 1}: rank {number} has other samples than the first rank of the same data rank"
        together = sorted(sample for own in readers.values() for sample in own)
        if together != sorted(expected):
            got, right = ([number for number, _ in samples] for samples in (together, sorted(expected)))
            what = f"samples {got}, expected {right}" if got != right else "a sample has other tokens"
            return f"step {step + 1}: {what}"
    return None


def not_held_once(ranks: Sequence[Results]) -> str | None:
    """Describe the first element that no rank would save, or more than one; None: there is none."""
    for name, shape in ranks[0].shapes.items():
        held = [(*piece[1:], number) for number, rank in enumerate(ranks) for piece in rank.held if piece[0] == name]
        end, before, numel = 0, 0, math.prod(shape)
        for start, stop, number in sorted(held):
            if start < end:
                return f"element {start} of {name} is held by rank {before} and by rank {number}"
            if start > end:
                break
            end, before = stop, number
        if end != numel:
            who = "no rank" if end < numel else f"rank {before}"
            return f"element {min(end, numel)} of {name}, which has {numel} elements, is held by {who}"
    return None


def stale_replica(ranks: Sequence[Results], weights: Mapping[str, Tensor]) -> str | None:
    """Describe the first weight whose value on a rank is not the one that would be saved; None: there is none."""
    last = len(ranks[0].losses) - 1
    for number, rank in enumerate(ranks):
        for name, mine in rank.tensors(f"weight/{last}"):
            whole = weights[name].view(rank.shapes[name])
            first, count = rank.rows.get(name, (0, len(whole)))
            if not torch.equal(mine, whole[first : first + count].to(mine.dtype)):
                return f"after the last step: weight {name} of rank {number} differs from the one that would be saved"
    return None


def _assembled(ranks: Sequence[Results]) -> State:
    """Assemble the states of all ranks into whole tensors; each element must be held once."""
    state: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("first", "weight", *_STATES)}
    for rank in ranks:
        for number, (name, start, stop) in enumerate(rank.held):
            for kind in state:
                if (part := rank.stored.get(f"{kind}/{number}")) is not None:
                    state[kind].setdefault(name, part.new_empty(math.prod(rank.shapes[name])))[start:stop] = part
    wide = {kind: {name: value.double() for name, value in state[kind].items()} for kind in state}
    wide["update"] = {name: value - wide["first"][name] for name, value in wide["weight"].items()}
    return {**wide, "weight": state["weight"]}


def _held(
    mine: State, theirs: State, shapes: Mapping[str, Sequence[int]], heads: Heads, tolerance: Tolerance
) -> Iterator[Difference]:
    """Yield the differences of the moments and the update of each parameter, then of the sizes of all updates."""
    for kind, measure in {**_STATES, "update": "update"}.items():
        updated = kind in ("update", "average")  # an average of updated weights has their tolerance
        most = tolerance.states if not updated or tolerance.updates is None else tolerance.updates
        how = {"heads": heads[0], "kv_heads": heads[1], "signs": tolerance.signs and updated}
        for name, apart in state_distances(mine[kind], theirs[kind], **how).items():
            yield Difference(measure, apart, most, f"after the last step: {measure} of {name}")
    for what, dims in (("matrices", 2), ("vectors", 1)):
        names = [name for name, shape in shapes.items() if len(shape) == dims]
        names = [name for name in names if not (tolerance.signs and name.endswith("attention.qkv.bias"))]
        if names:
            a, b = ([state["update"][name] for name in names] for state in (mine, theirs))
            where = f"after the last step: size of the updates of all {what}"
            yield Difference("size of updates", size_difference(a, b), tolerance.sizes, where)
