"""The most that a step allocates, counted, against the moments of a backward in closed form: within 1 %."""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megazero.comm.grid import Grid
from megazero.kernels.select import choose
from megazero.observe.allocations import Allocations
from megazero.plan.job import Job
from megazero.plan.model import Shape
from megazero.plan.peak import of_block, of_head
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, ids, job_on, pairwise, planned
from tests.plan.test_activations import DTYPES, plain
from tests.ranks import run_ranks

SIZES = {"layers": 3, "hidden": 128, "heads": 4, "ffn": 512, "seq_len": 64}
FLAVOURS = {
    "gpt": replace(SHAPES["gpt"], **SIZES, kv_heads=4),
    "llama": replace(SHAPES["llama"], **SIZES | {"ffn": 384}, kv_heads=2),
    "rotary": replace(SHAPES["gpt-untied-rotary"], **SIZES, kv_heads=4),
}
CASES = [
    (flavour, dropout, vocab, grid, dtype, recompute)
    for flavour in FLAVOURS
    for dropout in (0.0, 0.1)
    for vocab in (64, 2048)
    for grid in ((1, False), (2, False), (2, True))
    for dtype in DTYPES
    for recompute in ("none", "selective", "full")
]
COVER = pairwise(CASES)


def most(grid: Grid, layout: Job, shape: Shape, precision: Precision) -> int:
    """Bytes that the second step allocates at most."""
    rank = Rank(grid, layout, shape, precision)
    rank.step(0)
    rank.engine.begin_step()
    with Allocations() as counted:
        rank.pipeline.train([plain(rank.feed(1, 0))], lambda feed: feed)
    return counted.peak


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in COVER[:4] else pytest.mark.full) for c in CASES], ids=ids(CASES)
)
def test_the_most_is_the_formula(case: tuple) -> None:
    """Token by token numbers of the loss, and gradients of norms before they are delivered, are not in it."""
    check(case, fused=False)


FUSED = [case for case in COVER if "fp64" not in case]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FUSED[:4] else pytest.mark.full) for c in FUSED], ids=ids(FUSED)
)
def test_the_most_with_fused_kernels_is_the_formula_too(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.layouts.REFERENCE", choose("fused", torch.device("cpu"), torch.float32))
    check(case, fused=True)


@pytest.mark.parametrize("grid", [(1, False), (2, False), (2, True)], ids=str)
@pytest.mark.parametrize("chunk", [100, 512])
def test_the_loss_in_chunks(grid: tuple[int, bool], chunk: int) -> None:
    """The logits of a chunk in place of all: the formula, also where the loss is no longer the most."""
    case = ("gpt", 0.0, 8192, grid, next(iter(DTYPES)), "full")
    assert check(case, fused=False, loss_chunk=chunk) < check(case, fused=False)


def walked(job: Job, *, head: bool, fused: bool) -> Iterator[tuple[int, str]]:
    """The moments of a backward of all blocks, and of the head."""
    parts = range(job.shape.layers + 1 + head)
    if head:
        yield from of_head(job, parts, fused=fused)
    for last in job.lasts(parts):
        yield from of_block(job, range(last + 1), fused=fused)


def check(case: tuple, *, fused: bool, **how: int) -> int:
    """Compare the most with its formula; return it."""
    flavour, dropout, vocab, (tensor, sequence), dtype, recompute = case
    shape, precision = replace(FLAVOURS[flavour], dropout=dropout, vocab=vocab), DTYPES[dtype]
    layout = job_on(tensor, sequence=sequence, recompute=recompute, stage=0, **how)
    measured = run_ranks(tensor, most, layout, shape, precision, tensor=tensor)[0]
    predicted, _ = max(walked(planned(layout, shape, precision), head=True, fused=fused))
    assert predicted == pytest.approx(measured, rel=0.01)
    return measured


def test_every_moment_is_the_most_somewhere() -> None:
    """None is there for nothing; but `out` is never the most: the MLP before it in backward needs more."""
    found, names = set(), set()
    for flavour, dropout, vocab, (tensor, sequence), dtype, recompute in CASES:
        layout = job_on(tensor, sequence=sequence, recompute=recompute)
        job = planned(layout, replace(FLAVOURS[flavour], dropout=dropout, vocab=vocab), DTYPES[dtype])
        for narrow, head, rows in ((1, True, 16), (16, True, 16), (1, False, 16), (16, False, 16), (16, False, 1)):
            size = replace(job, shape=replace(job.shape, ffn=job.shape.ffn // narrow), micro_batch=rows)
            places = [*walked(size, head=head, fused=False)]
            found.add(max(places)[1])
            names |= {name for _, name in places}
    assert found == names - {"out"}
