"""What a block keeps, counted, against the closed form: to the byte."""

from dataclasses import replace

import pytest
import torch

import megazero.plan.layers as costs
from megazero.builders.assemble import StageInputs
from megazero.comm.grid import Grid
from megazero.observe.allocations import Allocations
from megazero.pipeline.executor import BACKWARDS
from megazero.plan.activations import kept_by_block, kept_by_blocks, kept_input
from megazero.plan.job import Bytes, Job
from megazero.plan.layers import Width, of_job
from megazero.plan.model import Kind, Shape
from megazero.schedules.actions import Action
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, job_on, pairwise, planned
from tests.ranks import run_ranks

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "seq_len": 32, "vocab": 64}
FLAVOURS = {
    "gpt": replace(SHAPES["gpt"], **SIZES),
    "gpt-dry": replace(SHAPES["gpt"], **SIZES, dropout=0.0),
    "llama": replace(SHAPES["llama"], **SIZES),
    "rotary": replace(SHAPES["gpt-untied-rotary"], **SIZES),
    "kinds": replace(SHAPES["llama"], **SIZES, kinds=(Kind(), Kind(rope=None))),
}
DTYPES = {
    "fp32": Precision(),
    "fp64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.bfloat16, torch.float32),
}


def plain(feed: StageInputs) -> StageInputs:
    """A plain causal micro-batch, without documents."""
    return replace(feed, now=replace(feed.now, positions_SB=None, documents=None))


def after_forward(grid: Grid, layout: Job, shape: Shape, precision: Precision, documents: bool = False) -> int:
    """Bytes that are there between a forward and its backward."""
    rank = Rank(grid, layout, shape, precision)
    feed = rank.feed(0, 0) if documents else plain(rank.feed(0, 0))
    there: list[int] = []

    def note(action: Action) -> None:
        if action.kind in BACKWARDS:
            there.append(counted.now)

    rank.engine.begin_step()
    with Allocations() as counted:
        rank.pipeline.train([feed], lambda feed: feed, before=note)
    return there[0]


CASES = [
    (flavour, grid, dtype, recompute)
    for flavour in FLAVOURS
    for grid in ((1, False), (2, False), (2, True))
    for dtype in DTYPES
    for recompute in ("none", "selective", "full")
]
COVER = pairwise(CASES)
DOCUMENTS = [("llama", "none"), ("gpt-dry", "selective")]


@pytest.mark.parametrize(
    ("flavour", "grid", "dtype", "recompute"),
    [pytest.param(*case, marks=() if case in COVER[:4] else pytest.mark.full) for case in CASES],
)
def test_what_a_block_keeps(flavour: str, grid: tuple[int, bool], dtype: str, recompute: str) -> None:
    """The difference that two more blocks make. Kept inputs of full recompute lie in the arena, and do not count."""
    shape, precision, (tensor, sequence) = FLAVOURS[flavour], DTYPES[dtype], grid
    layout = job_on(tensor, 1, sequence, 1, recompute=recompute)
    few, many = (
        run_ranks(tensor, after_forward, layout, replace(shape, layers=layers), precision, tensor=tensor)[0]
        for layers in (2, 4)
    )
    job = planned(layout, replace(shape, layers=4), precision)
    assert many - few == kept_by_blocks(job, range(3, 5))


@pytest.mark.parametrize(
    ("flavour", "recompute"),
    [
        pytest.param(flavour, recompute, marks=() if (flavour, recompute) in DOCUMENTS else pytest.mark.full)
        for flavour in ("gpt-dry", "llama", "rotary")
        for recompute in ("none", "selective")
    ],
)
def test_what_a_block_keeps_of_documents(flavour: str, recompute: str) -> None:
    """Whatever their lengths: two in each window, at another place in each."""
    shape, precision, layout = FLAVOURS[flavour], DTYPES["bf16"], job_on(2, recompute=recompute)
    few, many = (
        run_ranks(2, after_forward, layout, replace(shape, layers=layers), precision, True, tensor=2)[0]
        for layers in (2, 4)
    )
    job = replace(planned(layout, replace(shape, layers=4), precision), mask_eod=True)
    assert many - few == kept_by_blocks(job, range(3, 5))


def test_a_layer_that_forgets_what_it_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is of a run's memory, so that no layer can leave out a tensor."""
    shape, layout = FLAVOURS["rotary"], job_on(2, sequence=True)
    few, many = (
        run_ranks(2, after_forward, layout, replace(shape, layers=layers), DTYPES["bf16"], tensor=2)[0]
        for layers in (2, 4)
    )
    job = planned(layout, shape, DTYPES["bf16"])
    kind = shape.kinds[0]
    layers = of_job(job, kind)
    assert many - few == 2 * kept_by_block(job, kind)
    for at, layer in enumerate(layers):
        for field in ("kept", "statistics"):
            if getattr(layer, field) != Width():
                forgetful = (*layers[:at], replace(layer, **{field: Width()}), *layers[at + 1 :])
                monkeypatch.setattr(costs, "block", lambda *_, found=forgetful, **__: found)
                assert many - few != 2 * kept_by_block(job, kind), (layer.name, field)


def test_the_paper_s_34() -> None:
    """Korthikanti et al. 2022, Table 2, without scores: 34 s b h; with tensor parallelism 10 + 24 / t, with sequence
    parallelism 34 / t; less 2 for the masks of dropout, which we do not keep. The paper leaves out the statistics of
    two norms, 16 bytes a token, and of softmax, 4 a head.
    """
    shape = Shape(96, 12288, 96, 96, 4 * 12288, 51200, 2048)
    sbh = 2048 * 12288
    for tensor, sequence, factor in ((1, False, 34.0 - 2), (8, False, 10 - 2 + 24 / 8), (8, True, (34 - 2) / 8)):
        kept = kept_by_block(Job(shape, Bytes(2, 2, 4), tensor, sequence=sequence), shape.kinds[0])
        statistics = 2048 * (16 // (tensor if sequence else 1) + 4 * 96 // tensor)
        assert kept - statistics == sbh * factor
    whole = Job(shape, Bytes(2, 2, 4), tensor=8)
    assert kept_input(whole) == 2 * sbh == 8 * kept_input(replace(whole, partition=True))
