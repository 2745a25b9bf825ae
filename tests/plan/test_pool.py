"""Pools of whole parameters and gradients, by the ledger of real steps, where units of two kinds are of one size.

Sizes that coincide are where counting units of a size goes wrong: two units of one size need two buffers only if they
are in use at once.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megazero.comm.grid import Grid
from megazero.model.transformer import Shape
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.states import units
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, ids, job_on, planned
from tests.plan.test_activations import DTYPES
from tests.ranks import run_ranks

SMALL = {"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 64, "seq_len": 8, "dropout": 0.0}
GPT, LLAMA = replace(SHAPES["gpt"], **SMALL), replace(SHAPES["llama"], **SMALL)
BLOCK = 12 * 16 * 16 + 13 * 16  # of GPT: matrices, biases and norms
UNTIED = replace(LLAMA, tie_embeddings=False)

# What is of one size, on two data ranks; the names are those of `units`.
COINCIDENCES: dict[str, tuple[Shape, set[str]]] = {
    "embedding = head": (replace(UNTIED, vocab=401), {"embedding", "head"}),
    "embedding = block": (replace(UNTIED, vocab=258), {"embedding", "blocks.0"}),
    "head = block": (replace(UNTIED, vocab=256), {"head", "blocks.0"}),
    "tied = block": (replace(GPT, vocab=BLOCK // 16), {"tied", "blocks.0"}),
    "tied = embedding": (replace(GPT, vocab=60, seq_len=60), {"tied", "embedding"}),
    "tied = embedding = block": (
        replace(GPT, vocab=BLOCK // 16, seq_len=BLOCK // 16),
        {"tied", "embedding", "blocks.0"},
    ),
    "nothing": (replace(GPT, vocab=60), set()),
}
PIPELINES = [(1, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved", 2), (2, "zb-h1", 1), (2, "zb-v", 2)]
OFFLOADS: Mapping[str, dict[str, bool | str]] = {
    "device": {},
    "optimizer": {"offload_optimizer": "cpu"},
    "both": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
}
CASES = [
    (name, pipeline, stage, offload)
    for name in COINCIDENCES
    for pipeline in PIPELINES
    for stage in (1, 2, 3)
    for offload in OFFLOADS
    if (stage == 3 or offload != "both") and (stage > 1 or offload == "optimizer")
]

ONE, TWO = PIPELINES[0], PIPELINES[1]
FEW = [
    ("embedding = head", ONE, 2, "device"),  # never in use at once
    ("embedding = block", ONE, 3, "both"),
    ("tied = block", ONE, 3, "device"),  # beside two blocks, until the embedding's backward
    ("tied = block", (2, "interleaved", 2), 2, "optimizer"),
    ("tied = embedding = block", TWO, 3, "device"),
    ("tied = embedding = block", (2, "zb-v", 2), 3, "device"),  # both of its uses on one rank of two
    ("nothing", (2, "zb-v", 2), 1, "optimizer"),
]


def pooled(grid: Grid, layout: Job, shape: Shape, precision: Precision) -> tuple[int, int]:
    """The pipeline rank, and the bytes of its pools after two steps."""
    rank = Rank(grid, layout, shape, precision)
    for step in range(2):
        rank.step(step)
    found = grid.comm.ledger.bytes.get("pool")
    return grid["pipeline"].rank, 0 if found is None else found.now


def same_size(shape: Shape, layout: Any) -> set[str]:
    """The kinds of units, a block for all, that share their size with another kind."""
    sizes = {u.name: u.padded(2) for u in units(layout.shape, 1) if u.name in ("tied", "embedding", "blocks.0", "head")}
    count = Counter(sizes.values())
    return {name for name, size in sizes.items() if count[size] > 1}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FEW else pytest.mark.full) for case in CASES], ids=ids(CASES)
)
def test_pools_hold_what_is_in_use_at_once(case: tuple) -> None:
    name, (pipeline, schedule, chunks), stage, offload = case
    shape, expected = COINCIDENCES[name]
    layout = job_on(1, 2, False, 4, stage, pipeline=pipeline, schedule=schedule, chunks=chunks, **OFFLOADS[offload])
    size = planned(layout, shape, DTYPES["bf16"])
    assert same_size(shape, size) == expected
    for rank, measured in run_ranks(layout.ranks, pooled, layout, shape, DTYPES["bf16"], pipeline=pipeline):
        assert memory(size, rank).held.get("pool", 0) == measured, rank
