"""Recompute, Pa and Pa+cpu: the same bits as without, in every layout; what is kept, sent and allocated."""

import logging
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megazero.comm.grid import Grid
from megazero.comm.ledger import Ledger
from megazero.memory.activation_store import Arena
from megazero.memory.recompute import Kept, Recomputed
from megazero.model.dropout import Dropout
from megazero.observe.allocations import Allocations
from megazero.plan.job import Job
from megazero.zero.placement import Precision
from tests.layouts import RECOMPUTED, SHAPES, Rank, Trained, equal, ids, job_on, pairwise, train
from tests.ranks import run_ranks

DTYPES = {
    "fp32": Precision(),
    "fp64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.bfloat16, torch.float32),
}
SCHEDULES = {"none": ("1f1b", 1), "gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved": ("interleaved", 2)}
SCHEDULES |= {"zb-h1": ("zb-h1", 1), "zb-v": ("zb-v", 2)}
CASES = [
    (flavour, dtype, tensor, sequence, pipeline, data, stage, mode)
    for flavour in ("deep", "deep-untied")
    for dtype in DTYPES
    for tensor in (1, 2, 4)
    for sequence in (False, True)
    if tensor > 1 or not sequence
    for pipeline in SCHEDULES
    for data in (1, 2)
    if tensor * data * (1 if pipeline == "none" else 2) <= 8
    for stage in ((0, 1, 2, 3) if data > 1 else (1,))
    for mode in RECOMPUTED
]
COVER = pairwise([case for case in CASES if case[2] * case[5] * (1 if case[4] == "none" else 2) <= 4])


@cache
def without(flavour: str, dtype: str, layout: Job) -> Trained:
    return train(layout, flavour, DTYPES[dtype])


def check(
    flavour: str, dtype: str, tensor: int, sequence: bool, pipeline: str, data: int, stage: int, mode: str
) -> None:
    schedule, chunks = SCHEDULES[pipeline]
    ranks = 1 if pipeline == "none" else 2
    layout = job_on(tensor, data, sequence, 4, stage, pipeline=ranks, schedule=schedule, chunks=chunks)
    equal(train(replace(layout, **RECOMPUTED[mode]), flavour, DTYPES[dtype]), without(flavour, dtype, layout))


FEW = COVER[:3]  # the first of a cover hold most of its pairs
# What comes from disks is gathered: a cover's tensor ranks may all have split the stream already.
GATHERED = [("deep-untied", "bf16", 2, False, "interleaved", 1, 1, "Pa+nvme")]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in FEW + GATHERED else pytest.mark.full) for c in COVER + GATHERED],
    ids=ids(COVER + GATHERED),
)
def test_it_changes_no_bit(case: tuple) -> None:
    check(*case)


REST = [case for case in CASES if case not in COVER][::13]  # evenly over all: the whole product takes hours


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=ids(REST))
def test_it_changes_no_bit_anywhere(case: tuple) -> None:
    check(*case)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in ("selective", "Pa") else pytest.mark.full) for mode in RECOMPUTED]
)
def test_other_masks_the_second_time_are_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a replay that draws other dropout masks gives other gradients, but for selective
    recompute, where there is no dropout.
    """
    honest = Dropout.site
    monkeypatch.setattr(
        Dropout, "site", lambda self, x, step: honest(self, x, replace(step, step=step.step + step.recomputing))
    )
    layout = job_on(2, 1, accumulation=2)
    found, expected = (train(each, "deep", DTYPES["fp64"]) for each in (replace(layout, **RECOMPUTED[mode]), layout))
    same = all(torch.equal(value, expected.gradients[name]) for name, value in found.gradients.items())
    assert found.losses[0] == expected.losses[0] and same == (mode == "selective")


def test_a_slot_that_is_taken_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena that hands out what somebody keeps makes wrong gradients, and this sees it."""
    layout, put = replace(job_on(accumulation=4, schedule="gpipe"), **RECOMPUTED["full"]), Arena.put

    def careless(self: Arena, flat: Tensor) -> Tensor:
        slot = put(self, flat)
        self.give(slot)
        return slot

    expected = train(layout, "deep", DTYPES["fp64"])
    monkeypatch.setattr(Arena, "put", careless)
    monkeypatch.setattr(Arena, "give", lambda self, slot: self._free.append(slot) if len(self._free) < 4 else None)
    found = train(layout, "deep", DTYPES["fp64"])
    assert any(not torch.equal(value, expected.gradients[name]) for name, value in found.gradients.items())


WIDE = replace(SHAPES["deep"], hidden=128, heads=4, kv_heads=4, ffn=512, seq_len=64, vocab=64)


def tell(grid: Grid, layout: Job) -> dict[str, int]:
    """What a rank keeps, in bytes, and sends in its second step, in elements; the most that step allocates."""
    rank = Rank(grid, layout, WIDE, DTYPES["fp32"])
    rank.step(0)
    ledger = grid.comm.ledger

    def elements() -> dict[str, int]:
        axes = (axis for axis in ("tensor", "host", "disk") if axis in ledger.traffic)
        return {f"{axis} {what}": sent.elements for axis in axes for what, sent in ledger.traffic[axis].items()}

    before = elements()
    with Allocations() as counted:
        rank.step(1)
    told = {what: count - before.get(what, 0) for what, count in elements().items()}
    held = {category: held.now for category, held in ledger.bytes.items() if "inputs" in category}
    return told | held | {"activations": counted.peak}


def elements_of(layout: Job) -> int:
    """Of a block's input."""
    return WIDE.seq_len * layout.micro_batch * WIDE.hidden


@pytest.mark.parametrize(
    ("tensor", "mode"),
    [
        pytest.param(tensor, mode, marks=pytest.mark.full if tensor == 4 else ())
        for tensor in (1, 2, 4)
        for mode in ("full", "Pa", "Pa+cpu", "Pa+nvme")
    ],
)
def test_kept_inputs_are_the_formula(tensor: int, mode: str) -> None:
    """4 bytes x s b h x blocks / (tensor ranks with Pa), wherever they lie, two whole ones where they are put together
    again, and a part on its way to a disk.
    """
    layout = replace(job_on(tensor, accumulation=2), **RECOMPUTED[mode])
    n, blocks = elements_of(layout), WIDE.layers
    for told in run_ranks(tensor, tell, layout, tensor=tensor):
        kept = 4 * n * blocks // (1 if mode == "full" else tensor)
        whole = 0 if mode == "full" or (mode == "Pa" and tensor == 1) else 4 * 2 * n
        away, going = {"Pa+cpu": ("host", 0), "Pa+nvme": ("nvme", 4 * n // tensor)}.get(mode, (None, 0))
        assert told.get("inputs", 0) == (whole + going if away else kept + whole)
        for place, axis in (("host", "host"), ("nvme", "disk")):
            assert told.get(f"{place}_inputs", 0) == (kept if place == away else 0)
            moved = 2 * blocks * n // tensor if place == away else 0  # in two micro-batches
            assert told.get(f"{axis} inputs out", 0) == told.get(f"{axis} inputs back", 0) == moved


def test_sequence_parallelism_has_split_them_already(caplog: pytest.LogCaptureFixture) -> None:
    """Never a double split: Pa changes nothing there, and says so."""
    layout = replace(job_on(2, sequence=True, accumulation=2), **RECOMPUTED["full"])
    plain, split = (run_ranks(2, tell, each, tensor=2) for each in (layout, replace(layout, partition=True)))
    assert plain == split and plain[0]["inputs"] == 4 * elements_of(layout) * WIDE.layers // 2
    for asked, why in (
        (replace(layout, partition=True), "parallel.sequence already splits"),
        (replace(job_on(), **RECOMPUTED["Pa"]), "has one rank"),
    ):
        assert any(why in line for line in run_ranks(asked.tensor, said, asked, tensor=asked.tensor)[0])


def said(grid: Grid, layout: Job) -> list[str]:
    """What building a layout says."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megazero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    Rank(grid, layout, WIDE, DTYPES["fp32"])
    return lines


@pytest.mark.parametrize(("mode", "recomputed"), [("none", 0), ("selective", 0), ("full", 1), ("Pa", 1)])
@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.full)])
def test_traffic_of_a_block(tensor: int, mode: str, recomputed: int) -> None:
    """In units of n (t - 1) / t elements: 2 for every sum. The paper's block sums 2 times forward, 2 again and 2
    backward: 12. The last sum of a replay is left out, so here it is 10, and Pa's gather of 1 is a tenth of that; of
    the paper's 12 it is 1/12 (section 8).
    """
    layout = replace(job_on(tensor, accumulation=2), **RECOMPUTED.get(mode, {}))
    unit = elements_of(layout) * (tensor - 1) // tensor * WIDE.layers * layout.micro_batches
    for told in run_ranks(tensor, tell, layout, tensor=tensor):
        assert told["tensor block forward"] == (2 + recomputed) * 2 * unit
        assert told["tensor block backward"] == 2 * 2 * unit
        assert told.get("tensor inputs", 0) == (unit if mode == "Pa" else 0)
        if mode == "Pa":
            sums = told["tensor block forward"] + told["tensor block backward"]
            assert told["tensor inputs"] * 10 == sums and told["tensor inputs"] * 12 == sums + 2 * unit


@pytest.mark.full
def test_activations_shrink() -> None:
    """Each block's are gone but for one at a time: as many blocks more cost next to nothing."""
    deep = {mode: tell_deep(mode, 4) for mode in ("none", *RECOMPUTED)}
    flat = {mode: tell_deep(mode, 2) for mode in ("none", *RECOMPUTED)}
    each = {mode: (deep[mode] - flat[mode]) / 2 for mode in deep}
    assert each["selective"] < each["none"]
    assert each["full"] == each["Pa"] == each["Pa+cpu"] == each["Pa+nvme"] == 0


def tell_deep(mode: str, layers: int) -> int:
    def peak(grid: Grid, layout: Job) -> int:
        rank = Rank(grid, layout, replace(WIDE, layers=layers), DTYPES["fp32"])
        rank.step(0)
        with Allocations() as counted:
            rank.step(1)
        return counted.peak

    return run_ranks(1, peak, replace(job_on(accumulation=2), **RECOMPUTED.get(mode, {})))[0]


def test_an_arena_that_is_too_small_says_so() -> None:
    arena = Arena(1, 4, torch.float32, torch.device("cpu"), Ledger())
    slot = arena.put(torch.ones(4))
    with pytest.raises(AssertionError, match="all slots are taken"):
        arena.put(torch.ones(4))
    arena.give(slot)
    arena.put(torch.ones(4))


def test_a_part_alone_gives_the_gradients_of_autograd() -> None:
    """Of its input and of what it closes over, without an engine."""

    class Now:
        def recomputed(self) -> "Now":
            return self

    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, dtype=torch.float64)
    results = []
    for part in (lambda x, now: torch.tanh(layer(x)), Recomputed(lambda x, now: torch.tanh(layer(x)), Kept)):
        x = torch.linspace(0, 1, 16, dtype=torch.float64).view(2, 8).requires_grad_()
        layer.zero_grad()
        part(x, Now()).square().sum().backward()
        results.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
