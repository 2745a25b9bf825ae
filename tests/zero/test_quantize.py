"""Parameters and gradients sent as integers (`zero.quantize`): what comes is what the specification says, bit for bit.

Training with them against training without, within tolerances of their own; what is sent and held, to the byte.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.base.quantized import quantized_bytes
from megazero.comm.grid import Grid
from megazero.comm.pool import Pool
from megazero.extensions.quantized import QuantizedGathering, QuantizedSumming
from megazero.kernels.operations import REFERENCE
from megazero.kernels.reference import wide_dtype
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.states import units_of
from megazero.plan.traffic import traffic
from megazero.zero.placement import FlatBuffer, Placement, Precision
from tests.layouts import CPU, SHAPES, Trained, Wires, job_on, planned, rewired, second_step, train
from tests.ranks import run_ranks

FP32, MIXED = Precision(), Precision(torch.bfloat16, torch.float32)
EACH = 3 * 256 + 48  # elements of a shard: a last block that is short


def drawn(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def meant(x: Tensor, bits: int) -> Tensor:
    """What the codes of x mean, by the specification; as wide as sums are."""
    codes = torch.zeros(quantized_bytes(len(x), bits), dtype=torch.uint8)
    found = torch.empty(len(x), dtype=wide_dtype(x.dtype))
    REFERENCE.quantize_(codes, x, bits)
    REFERENCE.dequantize_(found, codes, bits, False)
    return found


def moved(grid: Grid, bits: int, dtype: torch.dtype, wires: Wires) -> tuple[Tensor, Tensor, Tensor]:
    """A gather, a reduce-scatter into this rank's part, and one that is added to what is there."""
    axis = rewired(grid, wires)["data"]
    pool = Pool(torch.uint8, CPU, axis.comm.ledger, "pool")
    whole = torch.full((EACH * axis.size,), torch.nan, dtype=dtype)
    shard = FlatBuffer(drawn(axis.rank, EACH, dtype), {axis: Placement.SHARD}, EACH * axis.rank)
    QuantizedGathering(bits, REFERENCE, pool, axis, dtype).start(shard, FlatBuffer(whole, {})).wait()
    x = drawn(axis.rank, EACH * axis.size, dtype)
    added = torch.ones(EACH, dtype=dtype)
    summing = QuantizedSumming(bits, REFERENCE, pool, axis)
    summing.start(FlatBuffer(x.clone(), {}), FlatBuffer(added, {}), accumulate=True).wait()
    out = x.split(EACH)[axis.rank]
    summing.start(FlatBuffer(x, {}), FlatBuffer(out, {}), accumulate=False).wait()
    return whole, out.clone(), added


@pytest.mark.parametrize("wires", [Wires(), Wires(sockets=True)], ids=["memory", "sockets"])
@pytest.mark.parametrize(
    ("ranks", "bits", "dtype"), [(2, 8, torch.float32), (4, 4, torch.bfloat16), (3, 4, torch.float64)]
)
def test_what_comes_is_what_the_codes_mean(ranks: int, bits: int, dtype: torch.dtype, wires: Wires) -> None:
    """A rank's own summand is not rounded; the others' are added in rank order."""
    found = run_ranks(ranks, moved, bits, dtype, wires)
    shards = torch.cat([meant(drawn(rank, EACH, dtype), bits) for rank in range(ranks)]).to(dtype)
    summands = [drawn(rank, EACH * ranks, dtype).split(EACH) for rank in range(ranks)]
    for rank, (whole, out, added) in enumerate(found):
        assert torch.equal(whole, shards)
        for result, total in ((out, summands[rank][rank].clone()), (added, 1 + summands[rank][rank])):
            for other in (k for k in range(ranks) if k != rank):
                total = (total + meant(summands[other][rank], bits)).to(dtype)
            assert torch.equal(result, total)


def in_hops(grid: Grid, bits: int) -> Tensor:
    """A reduce-scatter among neighbours and then between hosts, added to what is there."""
    data, pool = grid["data"], Pool(torch.uint8, CPU, grid.comm.ledger, "pool")
    summing = QuantizedSumming(bits, REFERENCE, pool, data, (grid["shard"], grid["replica"]))
    x = drawn(data.rank, EACH * data.size, torch.float32)
    return summing.start(FlatBuffer(x, {}), FlatBuffer(torch.ones(EACH), {}), accumulate=True).wait()


def test_what_comes_in_two_hops_is_rounded_once_at_each() -> None:
    found = run_ranks(4, in_hops, 8, shard=2)
    summands = [drawn(rank, EACH * 4, torch.float32).view(2, 2, EACH) for rank in range(4)]  # [host, place] of target
    sums: dict[tuple[int, int, int], Tensor] = {}  # of a host's neighbours, for a target
    for host in range(2):
        for at in range(2):
            for place in range(2):
                own, other = summands[2 * host + place], summands[2 * host + 1 - place]
                sums[host, at, place] = own[at, place] + meant(other[at, place], 8)
    for rank, out in enumerate(found):
        host, place = divmod(rank, 2)
        assert torch.equal(out, 1 + sums[host, host, place] + meant(sums[1 - host, host, place], 8))


BITS: dict[str, dict[str, str]] = {
    "parameters": {"quantize_parameters": "int8"},
    "gradients, 8 bits": {"quantize_gradients": "int8"},
    "gradients, 4 bits": {"quantize_gradients": "int4"},
    "both": {"quantize_parameters": "int8", "quantize_gradients": "int4"},
}
LAYOUTS: dict[str, tuple[Job, str]] = {
    "stage 1": (job_on(1, 2, False, 2, 1), "gpt"),
    "stage 2, 4 ranks": (job_on(1, 4, False, 2, 2), "deep-untied"),
    "stage 3": (job_on(1, 2, False, 2, 3), "deep"),
    "stage 3, 4 ranks, untied": (job_on(1, 4, False, 1, 3), "deep-untied"),
    "hybrid": (job_on(1, 4, False, 2, 3, shard_ranks=2), "deep"),
    "pipeline": (job_on(1, 2, False, 2, 3, pipeline=2), "deep"),
    "split backward": (job_on(1, 2, False, 2, 2, pipeline=2, schedule="zb-h1"), "deep"),
    "tensor": (job_on(2, 2, False, 2, 3), "gpt"),
    "tensor, sequence": (job_on(2, 2, True, 2, 3), "gpt"),
    "offloaded": (job_on(1, 2, False, 2, 3, offload_optimizer="cpu", offload_parameters="cpu"), "gpt"),
    "on disks": (job_on(1, 2, False, 2, 3, offload_optimizer="nvme", offload_parameters="nvme"), "gpt"),
}
CASES = [(name, what) for name, (job, _) in LAYOUTS.items() for what, bits in BITS.items()]
CASES = [(name, what) for name, what in CASES if LAYOUTS[name][0].stage == 3 or "quantize_parameters" not in BITS[what]]
FEW = [("stage 1", "gradients, 8 bits"), ("tensor", "both"), ("hybrid", "parameters"), ("pipeline", "both")]
MARKED = [pytest.param(*case, marks=() if case in FEW else pytest.mark.full) for case in CASES]

# By how much the first step's gradients may be off, beside the largest of all, and losses of two steps. A sender's code
# is off by half of 1/127 or 1/7 of its block's largest value, and a rank adds those of at most three. A weight is off
# by 2^-7 of a typical one; through four blocks, forth and back, about a hundred products add that up like a root.
OFF = {
    "parameters": (2.0**-4, 2e-3),
    "gradients, 8 bits": (3 / 254, 2e-4),
    "gradients, 4 bits": (3 / 14, 2e-3),
    "both": (2.0**-4 + 3 / 14, 4e-3),
}


@cache
def plain(name: str) -> Trained:
    job, flavour = LAYOUTS[name]
    return train(job, flavour, FP32)


@pytest.mark.parametrize(("name", "what"), MARKED)
def test_training_is_off_by_roundings(name: str, what: str) -> None:
    """And not by none. All ranks agree on every bit, which `train` checks."""
    (job, flavour), bits = LAYOUTS[name], BITS[what]
    found, expected = train(replace(job, **bits), flavour, FP32), plain(name)
    gradients, losses = OFF[what]
    assert found.losses == pytest.approx(expected.losses, rel=losses)
    largest = max(float(value.abs().max()) for value in expected.gradients.values())
    apart = [float((found.gradients[n] - value).abs().max()) for n, value in expected.gradients.items()]
    assert 0 < max(apart) <= gradients * largest


@pytest.mark.parametrize(("name", "what"), MARKED)
def test_what_is_sent_and_held_is_planned(name: str, what: str) -> None:
    """To the byte: traffic by axis and purpose, and the buffers of the pools."""
    (job, flavour), bits = LAYOUTS[name], BITS[what]
    job = replace(job, **bits)
    axes: dict[str, Any] = {"tensor": job.tensor, "pipeline": job.pipeline, "shard": job.neighbours}
    plan = planned(job, SHAPES[flavour], FP32)
    assert (plan.parameter_bits, plan.gradient_bits) == (job.parameter_bits, job.gradient_bits)
    across = job.tensor * job.data
    for number, (sent, held) in enumerate(run_ranks(job.ranks, second_step, job, flavour, FP32, **axes)):
        stage, shard_rank = number // across, number % across // job.tensor % job.shard
        assert traffic(plan, stage, shard_rank) == sent, f"rank {number}"
        assert memory(plan, stage, fused=False).held.get("pool", 0) == held.get("pool", 0), f"rank {number}"


def test_bytes_halve_and_quarter() -> None:
    """Of bf16 parameters to a half and of fp32 gradients to an eighth, and a scale of 4 bytes for each 256 values."""
    job, flavour = job_on(1, 2, False, 1, 3), "deep"
    coded = planned(replace(job, quantize_parameters="int8", quantize_gradients="int4"), SHAPES[flavour], MIXED)
    before, after = traffic(planned(job, SHAPES[flavour], MIXED))["data"], traffic(coded)["data"]
    padded, plain = (
        sum(unit.padded(2) for unit in units_of(each)) for each in (coded, planned(job, SHAPES[flavour], MIXED))
    )
    more = padded / plain  # so that every parameter has blocks of its own
    assert after["parameters"] / before["parameters"] == pytest.approx(more * (1 + 4 / 256) / 2, rel=0.03)
    assert after["gradients"] / before["gradients"] == pytest.approx(more * (1 / 2 + 4 / 256) / 4, rel=0.03)
