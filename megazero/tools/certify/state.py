"""Compare what the ranks of a layout hold together after training, and what they trained on, with one process.

    skipped      of each step whether it changed nothing, and the loss scale after it
    samples      of each step, each sample once over the data axis, and the same on all ranks that share a data rank
    held once    what the ranks would save is every element of every parameter, each exactly once
    replicas     the weights that every rank computes with are those that would be saved, in its dtype
    moments      both moments of Adam, each parameter as a whole
    update       the weights after all steps less the first ones, in the optimizer's precision
    sizes        its norm, over all matrices and over all vectors

The first four are exact.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.tools.certify.comparison import Compared, compare, times_of
from megazero.tools.certify.rank import Results
from megazero.tools.certify.tolerances import Tolerance, size_difference, state_distances

State = Mapping[str, Mapping[str, Tensor]]  # of each kind of tensor every parameter, flat
_KINDS = ("first", "weight", "exp_avg", "exp_avg_sq")
_COMPARED = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "update": "update"}


@dataclass(frozen=True)
class Certified(Compared):
    """The comparison with the largest relative differences of moments, updates, and sizes of updates."""

    moments: float = 0.0
    update: float = 0.0
    size: float = 0.0


@dataclass(frozen=True)
class _Found:
    """One difference: by what measure, how large, and where."""

    measure: str
    value: float
    tolerance: float
    where: str

    @property
    def line(self) -> str:
        return f"after the last step: {self.where}, {self.value:.1e} > {self.tolerance:.0e}"


def compare_all(ranks: Sequence[Results], alone: Results, heads: int, kv_heads: int, tolerance: Tolerance) -> Certified:
    """Compare all that a certificate compares.

    `fault` is the first of: samples, what was computed, what is held.

    Args:
        heads, kv_heads: the model's.
    """
    computed = compare(ranks, alone, heads, kv_heads, tolerance)
    exact = {"skipped steps": wrong_skip(ranks, alone), "samples": wrong_sample(ranks, alone)}
    exact["held once"] = not_held_once(ranks)
    found: list[_Found] = []
    if exact["held once"] is None:
        state = _assembled(ranks)
        exact["replicas"] = stale_replica(ranks, state["weight"])
        found = list(_differences(state, _assembled([alone]), alone.shapes, (heads, kv_heads), tolerance))
    times = {measure: math.inf if line else 0.0 for measure, line in exact.items()}
    for each in found:
        times[each.measure] = max(times.get(each.measure, 0.0), times_of(each.value, each.tolerance))
    lines = [exact["samples"], exact["skipped steps"], computed.fault, exact["held once"], exact.get("replicas")]
    lines += [each.line for each in found if not each.value <= each.tolerance]
    worst = {measure: [each.value for each in found if each.measure == measure] for measure in times}
    return Certified(
        computed.bitwise and not any(exact.values()) and all(each.value == 0 for each in found),
        computed.loss,
        computed.norm,
        computed.gradients,
        computed.weights,
        next((line for line in lines if line), None),
        {**computed.times, **times},
        max([*worst.get("first moment", []), *worst.get("second moment", [])], default=0.0),
        max(worst.get("update", []), default=0.0),
        max(worst.get("size of updates", []), default=0.0),
    )


def wrong_skip(ranks: Sequence[Results], alone: Results) -> str | None:
    """Return the first step that a rank skipped and one process did not, or after which their loss scales differ."""
    for step, expected in enumerate(alone.skips):
        for number, rank in enumerate(ranks):
            if rank.skips[step] != expected:
                words = [
                    f"{'skipped' if skipped else 'updated'}, loss scale {scale:g}"
                    for skipped, scale in (rank.skips[step], expected)
                ]
                return f"step {step + 1}: rank {number} has {words[0]}, expected {words[1]}"
    return None


def wrong_sample(ranks: Sequence[Results], alone: Results) -> str | None:
    """Return the first step whose samples are not those of one process, each read by one data rank."""
    for step, expected in enumerate(alone.samples):
        readers: dict[int, list[tuple[int, str]]] = {}
        for number, rank in enumerate(ranks):
            own = rank.samples[step]
            if sorted(readers.setdefault(rank.data_rank, own)) != sorted(own):
                return f"step {step + 1}: rank {number} has other samples than the first rank of its data rank"
        together = sorted(sample for own in readers.values() for sample in own)
        if together != sorted(expected):
            got, right = ([number for number, _ in samples] for samples in (together, sorted(expected)))
            what = f"samples {got}, expected {right}" if got != right else "a sample has other tokens"
            return f"step {step + 1}: {what}"
    return None


def not_held_once(ranks: Sequence[Results]) -> str | None:
    """Return the first element that no rank would save, or more than one."""
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
            who = "nobody" if end < numel else f"rank {before}"
            return f"element {min(end, numel)} of {name}, which has {numel}, is held by {who}"
    return None


def stale_replica(ranks: Sequence[Results], weights: Mapping[str, Tensor]) -> str | None:
    """Return the first weight that a rank computes with and that is not what would be saved."""
    last = len(ranks[0].losses) - 1
    for number, rank in enumerate(ranks):
        for name, mine in rank.tensors(f"weight/{last}"):
            whole = weights[name].view(rank.shapes[name])
            first, count = rank.rows.get(name, (0, len(whole)))
            if not torch.equal(mine, whole[first : first + count].to(mine.dtype)):
                return f"after the last step: weight {name} of rank {number} is not the one that would be saved"
    return None


def _assembled(ranks: Sequence[Results]) -> State:
    """Return what all ranks hold, as whole tensors; each element is held once."""
    state: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    for rank in ranks:
        for number, (name, start, stop) in enumerate(rank.held):
            for kind in _KINDS:
                part = rank.stored[f"{kind}/{number}"]
                whole = state[kind].setdefault(name, part.new_empty(math.prod(rank.shapes[name])))
                whole[start:stop] = part
    return state


def _differences(
    mine: State, theirs: State, shapes: Mapping[str, Sequence[int]], heads: tuple[int, int], tolerance: Tolerance
) -> Iterator[_Found]:
    """Yield the differences of the moments and the update of each parameter, then of the sizes of all updates."""
    of_both = [{**_wide(state), "update": _updates(state)} for state in (mine, theirs)]
    for kind, measure in _COMPARED.items():
        a, b = (state[kind] for state in of_both)
        for name, apart in state_distances(a, b, heads=heads[0], kv_heads=heads[1]).items():
            yield _Found(measure, apart, tolerance.states, f"{measure} of {name}")
    for what, dims in (("matrices", 2), ("vectors", 1)):
        names = [name for name, shape in shapes.items() if len(shape) == dims]
        if names:
            a, b = ([state["update"][name] for name in names] for state in of_both)
            yield _Found(
                "size of updates", size_difference(a, b), tolerance.sizes, f"size of the updates of all {what}"
            )


def _wide(state: State) -> dict[str, dict[str, Tensor]]:
    return {kind: {name: value.double() for name, value in state[kind].items()} for kind in state}


def _updates(state: State) -> dict[str, Tensor]:
    return {name: value.double() - state["first"][name].double() for name, value in state["weight"].items()}
