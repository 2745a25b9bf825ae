"""Error feedback of quantised gradients (`zero.quantize.error_feedback`): what rounding loses comes later."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.base.quantized import BLOCK
from megazero.comm.grid import Grid
from megazero.comm.pool import Pool
from megazero.extensions.quantized import QuantizedSumming
from megazero.kernels.operations import REFERENCE
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.zero.placement import FlatBuffer
from tests.layouts import CPU, SHAPES, Rank, equal, job_on, planned, record, second_step, train, train_rank
from tests.ranks import run_ranks
from tests.zero.test_quantize import EACH, FP32, MIXED, drawn, meant

STEPS = 6


def summing_of(grid: Grid, bits: int, *, feedback: bool, hops: bool) -> QuantizedSumming:
    axis = grid["data"]
    pool, residuals = Pool(torch.uint8, CPU, axis.comm.ledger, "pool"), None
    if feedback:
        residuals = torch.zeros((axis.size - 1, EACH), dtype=torch.float64)
    ends = (grid["shard"], grid["replica"]) if hops else None
    return QuantizedSumming(bits, REFERENCE, pool, axis, ends, residuals, torch.ones(()))


def reduced(
    grid: Grid, bits: int, hops: bool, feedback: bool = True, odd: bool = False
) -> tuple[list[Tensor], Tensor | None]:
    """A rank's sums of some steps in fp64, and what it has kept at the end.

    Args:
        odd: an element of the first step is infinite.
    """
    axis = grid["data"]
    summing, found = summing_of(grid, bits, feedback=feedback, hops=hops), []
    for step in range(STEPS):
        x = drawn(100 * step + axis.rank, EACH * axis.size, torch.float64)
        if odd and step == 0:
            x[EACH * ((axis.rank + 1) % axis.size) + BLOCK] = torch.inf
        out = torch.zeros(EACH, dtype=torch.float64)
        summing.start(FlatBuffer(x, {}), FlatBuffer(out, {}), accumulate=False).wait()
        found.append(out)
    return found, summing.residuals


def exact(ranks: int) -> Tensor:
    """The sum over all steps and ranks, whole."""
    given = [drawn(100 * step + rank, EACH * ranks, torch.float64) for step in range(STEPS) for rank in range(ranks)]
    return torch.stack(given).sum(0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_step_sends_what_the_one_before_has_lost(ranks: int, bits: int) -> None:
    """Bit for bit what the specification says of x and what was lost before."""
    found = run_ranks(ranks, reduced, bits, False)
    lost = torch.zeros(ranks, ranks, EACH, dtype=torch.float64)  # from, to
    for step in range(STEPS):
        x = [drawn(100 * step + rank, EACH * ranks, torch.float64).split(EACH) for rank in range(ranks)]
        for rank, (sums, _) in enumerate(found):
            total = x[rank][rank].clone()
            for other in (k for k in range(ranks) if k != rank):
                sent = x[other][rank] + lost[other, rank]
                total += meant(sent, bits)
                lost[other, rank] = sent - meant(sent, bits)
            assert torch.equal(sums[step], total)
    for rank, (_, residuals) in enumerate(found):
        assert torch.equal(residuals, torch.stack([lost[rank, k] for k in range(ranks) if k != rank]))


@pytest.mark.parametrize("hops", [False, True], ids=["one hop", "two hops"])
def test_nothing_is_lost_in_the_long_run(hops: bool) -> None:
    """All that has come is off by one rounding, however many steps there were; without feedback by more of them."""
    total, off = exact(4), {}
    for feedback in (False, True):
        found = run_ranks(4, reduced, 4, hops, feedback, shard=2)
        come = torch.cat([sum(sums) for sums, _ in found])
        off[feedback] = (come - total).square().mean().sqrt()
    assert off[True] < 0.6 * off[False]  # one rounding against the root of six


def test_what_is_on_its_way_and_what_is_kept_are_all_there_is() -> None:
    """In one hop: come + kept = given, to the rounding of fp64."""
    found = run_ranks(3, reduced, 4, False)
    come = torch.cat([sum(sums) for sums, _ in found])
    for rank, (_, residuals) in enumerate(found):
        for kept, other in zip(residuals, (k for k in range(3) if k != rank), strict=True):
            come[other * EACH : (other + 1) * EACH] += kept
    assert torch.allclose(come, exact(3), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("hops", [False, True], ids=["one hop", "two hops"])
def test_of_what_is_not_finite_nothing_is_kept(hops: bool) -> None:
    """The step is not finite where it was not; no later one is."""
    for sums, residuals in run_ranks(4, reduced, 8, hops, True, True, shard=2):
        assert not sums[0][BLOCK : 2 * BLOCK].isfinite().any()
        assert sums[0][:BLOCK].isfinite().all()
        assert all(later.isfinite().all() for later in sums[1:]) and residuals.isfinite().all()


FED: dict[str, Any] = {"quantize_gradients": "int4", "error_feedback": True}
LAYOUTS: dict[str, tuple[Job, str]] = {
    "stage 1": (job_on(1, 2, False, 2, 1, **FED), "gpt"),
    "stage 2": (job_on(1, 4, False, 2, 2, **FED), "deep-untied"),
    "stage 3, near": (job_on(1, 4, False, 2, 3, secondary_ranks=2, quantize_parameters="int8", **FED), "deep"),
    "hybrid": (job_on(1, 4, False, 2, 3, shard_ranks=2, **FED), "deep"),
    "pipeline, tied": (job_on(1, 2, False, 2, 2, pipeline=2, schedule="zb-h1", **FED), "deep"),
    "offloaded": (job_on(1, 2, False, 2, 3, offload_optimizer="cpu", offload_parameters="cpu", **FED), "gpt"),
}
FEW = ("stage 1", "stage 3, near")
CASES = [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in LAYOUTS]


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_planned(name: str) -> None:
    """To the byte: a residual for each element of the other ranks' shards."""
    job, flavour = LAYOUTS[name]
    plan = planned(job, SHAPES[flavour], MIXED)
    assert plan.error_feedback
    axes: dict[str, Any] = {"tensor": job.tensor, "pipeline": job.pipeline, "shard": job.neighbours}
    across = job.tensor * job.data
    for number, (_, held) in enumerate(run_ranks(job.ranks, second_step, job, flavour, MIXED, **axes)):
        expected = memory(plan, number // across, fused=False).held
        for category in ("residuals", "pool"):
            assert held.get(category, 0) == expected.get(category, 0), (number, category)
        assert held["residuals"]


@pytest.mark.parametrize("name", CASES)
def test_a_first_micro_batch_is_sent_as_without(name: str) -> None:
    """And what comes behind it is not."""
    job, flavour = LAYOUTS[name]
    job = replace(job, micro_batch=job.micro_batch * job.micro_batches)  # the only one of its step
    found, plain = (train(each, flavour, FP32) for each in (job, replace(job, error_feedback=False)))
    assert all(torch.equal(value, plain.gradients[n]) for n, value in found.gradients.items())
    assert any(not torch.equal(value, plain.weights[n]) for n, value in found.weights.items())


def forgetful(grid: Grid, job: Job, *arguments: Any) -> Any:
    """Trains, and forgets behind each step what was lost."""
    rank = Rank(grid, job, *arguments)

    def step(of: Rank, number: int) -> Any:
        done = Rank.step(of, number)
        of.engine.forget_between_steps()
        return done

    return record(rank, step)


def test_what_is_forgotten_is_as_if_there_had_been_nothing() -> None:
    job = job_on(1, 2, False, 1, 2, **FED)
    with_feedback, without = train(job, "gpt", FP32, forgetful), train(replace(job, error_feedback=False), "gpt", FP32)
    equal(with_feedback, without)
    assert train(job, "gpt", FP32, train_rank).losses == without.losses  # the second forward sees one update
