"""Every grid computes the model that one process does: tensor, sequence and data parallelism, stages, accumulation.

Dropout is on, valid tokens are uneven (some samples have none), windows hold two documents, the vocabulary does not
divide by the tensor axis, and clipping acts.
"""

from functools import cache, partial

import pytest
import torch

from megazero.plan.job import Job
from megazero.tools.certify.tolerances import (
    GRADIENT_FP32,
    GRADIENT_FP64,
    LOSS_16_BITS,
    LOSS_FP32,
    LOSS_FP64,
    NORM_16_BITS,
    WEIGHTS_FP32,
    WEIGHTS_FP64,
    difference,
    weight_differences,
)
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Trained, Wires, equal, ids, job_on, pairwise, train, train_rank

FP32, FP64 = Precision(), Precision(torch.float64, torch.float64)
DTYPES = {"fp32": FP32, "fp64": FP64}
HALVES = {
    f"{name}-{gradients}": Precision(dtype, dtype if gradients == "param" else torch.float32)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    for gradients in ("fp32", "param")
}
LOSS = {"fp32": LOSS_FP32, "fp64": LOSS_FP64}
GRADIENT = {"fp32": GRADIENT_FP32, "fp64": GRADIENT_FP64}
WEIGHTS = {"fp32": WEIGHTS_FP32, "fp64": WEIGHTS_FP64}
GRIDS = [(tp, dp) for tp in (1, 2, 4) for dp in (1, 2, 4) if tp * dp <= 8]
CASES = [
    (flavour, dtype, grid, sequence, accumulation, stage)
    for flavour in ("gpt", "llama", "gpt-untied-rotary")
    for dtype in DTYPES
    for grid in GRIDS
    for sequence in (False, True)
    if grid[0] > 1 or not sequence
    for accumulation in (1, 4)
    for stage in ((0, 1, 2, 3) if grid[1] > 1 else (1,))
]
COVER = pairwise(CASES)


@cache
def alone(flavour: str, dtype: str, *, delayed: bool = False) -> Trained:
    """One process, one micro-batch."""
    late = {"stage": 1, "offload_optimizer": "cpu", "delayed": True} if delayed else {}
    return train(job_on(**late), flavour, DTYPES[dtype])


def check(flavour: str, dtype: str, grid: tuple[int, int], sequence: bool, accumulation: int, stage: int) -> None:
    compare(train(job_on(*grid, sequence, accumulation, stage), flavour, DTYPES[dtype]), flavour, dtype)


def compare(found: Trained, flavour: str, dtype: str, *, delayed: bool = False) -> None:
    """Hold what a layout computed against one process."""
    expected = alone(flavour, dtype, delayed=delayed)
    assert found.initial.keys() == expected.initial.keys()
    for name, value in expected.initial.items():
        assert torch.equal(found.initial[name], value), name
    assert difference(found.losses, expected.losses) <= LOSS[dtype]
    assert difference(found.norms[:1], expected.norms[:1]) <= GRADIENT[dtype]
    assert difference(found.norms, expected.norms) <= WEIGHTS[dtype]
    heads, kv_heads = SHAPES[flavour].heads, SHAPES[flavour].kv_heads
    for kind, tolerance in (("gradients", GRADIENT[dtype]), ("weights", WEIGHTS[dtype])):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        for name, value in weight_differences(mine, theirs, heads=heads, kv_heads=kv_heads).items():
            assert value <= tolerance, f"{kind} of {name}"


@pytest.mark.parametrize("case", COVER, ids=ids(COVER))
def test_a_grid_computes_what_one_process_does(case: tuple) -> None:
    check(*case)


# Chunks of the sums in forward; 3 of them are not of one length.
CHUNKED = [
    ("gpt", "fp64", job_on(2, 1, False, 1, 1, tensor_chunks=2)),
    ("gpt", "fp32", job_on(2, 1, True, 1, 1, tensor_chunks=3, recompute="full")),
    ("llama", "fp64", job_on(4, 1, True, 2, 1, tensor_chunks=3)),
    ("llama", "fp32", job_on(2, 2, True, 2, 3, tensor_chunks=2, recompute="selective")),
    ("gpt-untied-rotary", "fp32", job_on(4, 1, False, 1, 1, tensor_chunks=3, recompute="full", partition=True)),
    ("gpt", "fp64", job_on(2, 1, True, 4, 1, tensor_chunks=3, pipeline=2, schedule="zb-h1")),
]


@pytest.mark.parametrize(("flavour", "dtype", "job"), CHUNKED, ids=ids(CHUNKED))
def test_a_grid_in_chunks_does_too(flavour: str, dtype: str, job: Job) -> None:
    compare(train(job, flavour, DTYPES[dtype]), flavour, dtype)


# Stages, micro-batches. With several, 0 and 1 add them up before the ranks, 2 and 3 after them.
SAME = [((0, 1), 2), ((2, 3), 2), ((1, 2), 1)]


GRIDS = [(1, 2, False), (1, 4, False), (2, 2, True), (2, 4, False)]
STAGES = [(same, grid, dtype) for same in SAME for grid in GRIDS for dtype in DTYPES]
FEW = pairwise(STAGES)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FEW else pytest.mark.full) for c in STAGES], ids=ids(STAGES)
)
def test_stages_are_equal_bit_for_bit(case: tuple) -> None:
    (stages, accumulation), (tensor, data, sequence), dtype = case
    one, other = (train(job_on(tensor, data, sequence, accumulation, stage), "gpt", DTYPES[dtype]) for stage in stages)
    equal(one, other)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(name, marks=() if name in ("bf16-fp32", "fp16-param") else pytest.mark.full) for name in HALVES],
)
@pytest.mark.parametrize(("tensor", "data", "sequence", "accumulation"), [(1, 2, False, 1), (2, 2, True, 2)])
def test_stages_are_equal_in_16_bits_too(tensor: int, data: int, sequence: bool, accumulation: int, dtype: str) -> None:
    """Bit for bit among each other; one process in fp32 is as near as 16 bits let it."""
    runs = [train(job_on(tensor, data, sequence, accumulation, stage), "gpt", HALVES[dtype]) for stage in range(4)]
    equal(runs[0], runs[1])
    equal(runs[2], runs[3])
    if accumulation == 1:
        equal(runs[1], runs[2])
    for run in runs:
        assert difference(run.losses, alone("gpt", "fp32").losses) <= LOSS_16_BITS
        assert difference(run.norms, alone("gpt", "fp32").norms) <= NORM_16_BITS


@pytest.mark.parametrize("stage", [pytest.param(s, marks=() if s in (1, 3) else pytest.mark.full) for s in range(4)])
@pytest.mark.parametrize("sockets", [False, True], ids=["shared", "sockets"])
def test_the_size_of_pieces_changes_nothing(sockets: bool, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 KiB at a time: every unit goes in many."""
    layout = job_on(2, 2, True, 2, stage)
    whole = train(layout, "llama", FP32)
    monkeypatch.setattr("megazero.comm.transport.exchange.SLOT_BYTES", 1 << 11)
    equal(train(layout, "llama", FP32, partial(train_rank, wires=Wires(1 << 11, sockets))), whole)


REST = [case for case in CASES if case not in COVER]


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=ids(REST))
def test_every_grid_computes_what_one_process_does(case: tuple) -> None:
    check(*case)
