"""The search against all combinations, and what must hold of any plan of memory."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.plan import waves
from megazero.plan.job import Bytes, Job
from megazero.plan.machines import MACHINES, Disk, Machine
from megazero.plan.memory import memory
from megazero.plan.model import Shape
from megazero.plan.optimizers import Optimizers
from megazero.plan.search import OFFLOAD, RECOMPUTE, everywhere, fits, fullest, search, spreads
from megazero.plan.time import step_time

LLAMA = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": False}
SMALL = Shape(8, 1024, 16, 16, 4096, 8192, 512, dropout=0.1)
GATED = Shape(8, 1024, 16, 4, 2816, 8192, 512, **LLAMA, dropout=0.1)
HALF = Bytes(2, 4, 4)


def tight(gigabytes: float) -> Machine:
    """An A100 with less memory, too little for many communicators."""
    return replace(MACHINES["a100-80gb"], memory_bytes=int(gigabytes * 1e9), nccl_channels=1)


@given(st.sampled_from([*spreads(Job(GATED, HALF, global_batch=32), 8, 8, 8)]), st.sampled_from(RECOMPUTE))
def test_an_update_is_that_of_the_job_at_rest(layout: Job, saving: dict[str, object]) -> None:
    job = replace(layout, **saving, optimizers=Optimizers("muon"))  # type: ignore[arg-type]
    for rank in range(job.pipeline):
        assert waves.waves(job, rank) == waves.waves(job.at_rest, rank)
        assert waves.messages(job, rank, None, None) == waves.messages(job.at_rest, rank, None, None)


@pytest.mark.parametrize(
    ("gigabytes", "shape"),
    [
        pytest.param(1.8, SMALL, id="1.8-gelu", marks=pytest.mark.full),
        pytest.param(1.8, GATED, id="1.8-gated", marks=pytest.mark.full),
        pytest.param(80.0, SMALL, id="80.0-gelu", marks=pytest.mark.full),
        pytest.param(80.0, GATED, id="80.0-gated"),
    ],
)
def test_the_best_is_the_best_of_all_combinations(gigabytes: float, shape: Shape) -> None:
    job, machine = Job(shape, HALF, global_batch=8), tight(gigabytes)
    every = []
    bare = {replace(layout, stage=0) for layout in spreads(job, 4, 8, 8)}
    for layout, stage, offload, recompute in product(bare, range(4), OFFLOAD, RECOMPUTE):
        if (stage < 1 and offload) or (stage < 3 and "offload_parameters" in offload):
            continue
        candidate = replace(layout, stage=stage, **offload, **recompute)  # type: ignore[arg-type]
        if all(fits(rank, machine) for rank in everywhere(candidate, machine)):
            every.append(step_time(candidate, machine).step_s)
    found = search(job, 4, machine, lambda layout: True)
    assert [one.time.step_s for one in found.best[:1]] == pytest.approx(sorted(every)[:1])
    assert all(fits(rank, machine) for one in found.best for rank in everywhere(one.job, machine))


@pytest.mark.full
def test_what_fits_nowhere_else_goes_to_disks() -> None:
    job = Job(SMALL, HALF, global_batch=8)
    machine = replace(tight(1.3), host_memory_bytes=10**6, disk=Disk(10**12, 3e9, 3e9))
    found = search(job, 4, machine, lambda layout: True)
    assert found.best and all(one.job.offload_optimizer == "nvme" and one.fullest.disk for one in found.best)
    assert not search(job, 4, replace(machine, disk=None), lambda layout: True).best
    slow = replace(machine, disk=Disk(10**12, 1e8, 1e8))
    assert search(job, 4, slow, lambda layout: True).best[0].time.step_s > found.best[0].time.step_s


@st.composite
def layouts(draw: st.DrawFn) -> Job:
    tensor, pipeline, data = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)))
    schedule, chunks = draw(st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]))
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    return Job(
        replace(draw(st.sampled_from([SMALL, GATED])), dropout=draw(st.sampled_from([0.0, 0.1]))),
        draw(st.sampled_from([HALF, Bytes(2, 2, 4), Bytes(4, 4, 4)])),
        tensor,
        pipeline,
        data,
        sequence=tensor > 1 and draw(st.booleans()),
        schedule=schedule if pipeline > 1 else "1f1b",
        chunks=chunks if pipeline > 1 else 1,
        stage=draw(st.integers(0, 3)),
        micro_batch=draw(st.sampled_from([1, 2])),
        global_batch=64,
        recompute=recompute,
        partition=recompute == "full" and draw(st.booleans()),
    )


def peaks(layout: Job) -> list[int]:
    return [memory(layout, rank).peak for rank in range(layout.pipeline)]


@settings(max_examples=60, derandomize=True)
@given(layouts())
def test_more_ranks_never_need_more(layout: Job) -> None:
    """Data ranks at the same micro-batches: nothing grows but padding, and from one to two the pool."""
    more = replace(layout, data=2 * layout.data, global_batch=2 * layout.global_batch)
    padding = 16 * 16 * 2 * layout.data * layout.shape.layers
    pools = [memory(more, rank).held.get("pool", 0) for rank in range(more.pipeline)] if layout.data == 1 else None
    for rank, (few, many) in enumerate(zip(peaks(layout), peaks(more), strict=True)):
        assert many <= few + padding + (pools[rank] if pools else 0)


@settings(max_examples=60, derandomize=True)
@given(layouts())
def test_what_rests_shrinks_with_the_stage(layout: Job) -> None:
    """And with recompute, and with Pa, and with sequence parallelism: each step needs no more than the one before."""
    states = []
    for stage in range(4):
        held = memory(replace(layout, stage=stage), 0).held
        states.append(sum(held.get(name, 0) for name in ("parameters", "gradients", "optimizer")))
    assert states == sorted(states, reverse=True)
    full = replace(layout, recompute="full", partition=False)
    kept = [
        sum(memory(one, 0).held.get(n, 0) for n in ("activations", "inputs"))
        for one in (
            replace(full, recompute="none"),
            replace(full, recompute="selective"),
        )
    ]
    assert kept == sorted(kept, reverse=True)
    assert memory(replace(full, partition=True), 0).held["inputs"] <= memory(full, 0).held["inputs"] * (
        1 if full.tensor == 1 or full.sequence else 1 / full.tensor + 2
    )


def test_what_the_paper_could_not_hold() -> None:
    """ZeRO, Figure 4: with no tensor ranks 13B fits on 128 GPUs, plain data parallelism ends at 1.4B."""
    v100 = replace(MACHINES["v100-32gb"], nccl_channels=0)  # the paper's system had other communicators

    def gpt(layers: int, hidden: int, heads: int) -> Shape:
        return Shape(layers, hidden, heads, heads, 4 * hidden, 50257, 1024)

    def job(shape: Shape, micro: int, stage: int, recompute: str = "full") -> Job:
        return Job(
            shape,
            Bytes(2, 2, 4),
            data=128,
            stage=stage,
            micro_batch=micro,
            global_batch=128 * micro,
            recompute=recompute,
        )

    assert fits(fullest(everywhere(job(gpt(62, 4096, 32), 2, 2), v100)), v100)
    assert not fits(fullest(everywhere(job(gpt(62, 4096, 32), 2, 1), v100)), v100)
    assert fits(fullest(everywhere(job(gpt(24, 1920, 16), 8, 0), v100)), v100)
    assert not fits(fullest(everywhere(job(gpt(54, 1920, 16), 1, 0), v100)), v100)
