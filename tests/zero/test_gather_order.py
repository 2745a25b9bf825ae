"""When stage 3 gathers and reduces: what is queued first, and that no gather waits behind what nobody waits for."""

from itertools import pairwise

import pytest

from megazero.comm.grid import Grid
from megazero.plan.job import Job
from tests.layouts import SHAPES, Rank, job_on
from tests.ranks import run_ranks
from tests.zero.test_faults import FP64

LAYOUTS = {
    "one stage": job_on(1, 2, False, 2, 3),
    "1f1b": job_on(1, 2, False, 4, 3, pipeline=2),
    "zb-h1": job_on(1, 2, False, 4, 3, pipeline=2, schedule="zb-h1"),
}
PASSES = ("FORWARD", "BACKWARD", "BACKWARD_INPUT")
Event = tuple[str, str]  # unit, what happened to it


def events(grid: Grid, job: Job) -> tuple[list[list[Event]], list[str]]:
    """Return what happens in the second step from each of this rank's forwards or backwards to the next, and which."""
    rank = Rank(grid, job, SHAPES["deep"], FP64)
    rank.step(0)
    found: list[list[Event]] = []
    names: list[str] = []
    for unit in rank.engine.units:
        unit.listen(lambda event, name=unit.name: found[-1].append((name, event)))

    def begin(action) -> None:
        names.append(action.kind.name)
        found.append([])

    rank.engine.begin_step()
    rank.passes(1, before=begin)
    return found, names


def backwards(job: Job) -> list[tuple[list[Event], list[Event] | None]]:
    """The events of every backward of all ranks, and those of the forward that comes next, if one does."""
    found = []
    for phases, kinds in run_ranks(2 * job.pipeline, events, job, pipeline=job.pipeline):
        named = [(kind, of) for kind, of in zip(kinds, phases, strict=True) if kind in PASSES]
        for (kind, of), (after, then) in pairwise([*named, ("", [])]):
            if kind != "FORWARD":
                found.append((of, then if after == "FORWARD" else None))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_next_forward_s_first_units_are_on_their_way_when_a_backward_ends(name: str) -> None:
    """Where that is the embedding, whose backward needs no parameters; a later stage gathers its first block again."""
    followed = 0
    for backward, forward in backwards(LAYOUTS[name]):
        coming = open_gathers(backward)
        if forward is not None and not forward[0][0].startswith("blocks"):
            followed += 1
            assert coming == {"tied", "embedding"} and forward[0] == ("tied", "gathered")
        else:
            assert not coming
    job = LAYOUTS[name]
    assert followed == job.data * (job.micro_batches - job.pipeline)


@pytest.mark.parametrize("name", ["one stage", "1f1b"])
def test_no_gather_of_a_backward_is_queued_behind_the_reduction_that_its_computation_hides(name: str) -> None:
    """They share a communicator, in which operations run in the order in which they are queued.

    The reduction of a unit begins when its layer's backward has ended; the next layer's gather has begun before that,
    so it waits for the reductions of layers before at most, which had the same time to end.
    """
    compared = 0
    for backward, _ in backwards(LAYOUTS[name]):
        for layer in range(1, SHAPES["deep"].layers):
            hidden, needed = (f"blocks.{layer}", "reduce"), (f"blocks.{layer - 1}", "gather")
            if hidden in backward and needed in backward:
                compared += 1
                assert backward.index(needed) < backward.index(hidden)
    assert compared


def open_gathers(events: list[Event]) -> set[str]:
    """The units whose gathering has begun last, and not ended."""
    last = {unit: event for unit, event in events if event in ("gather", "gathered")}
    return {unit for unit, event in last.items() if event == "gather"}
