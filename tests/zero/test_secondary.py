"""Second shards of parameters among neighbours (`zero.secondary_ranks`): the same bits, and less that goes far."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.comm.grid import Grid, single
from megazero.extensions import registry
from megazero.kernels.operations import REFERENCE
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.traffic import traffic
from tests.layouts import SHAPES, Rank, config_of, equal, job_on, planned, second_step, train
from tests.ranks import run_ranks
from tests.zero.test_offload import DTYPES

LAYOUTS: dict[str, tuple[Job, str]] = {
    "all are near": (job_on(1, 2, False, 2, 3), "deep"),
    "4 ranks": (job_on(1, 4, False, 2, 3), "deep"),
    "one micro-batch": (job_on(1, 4, False, 1, 3), "deep-untied"),
    "recompute": (job_on(1, 4, False, 2, 3, recompute="full"), "deep"),
    "pipeline": (job_on(1, 4, False, 2, 3, pipeline=2), "deep"),
    "split backward": (job_on(1, 4, False, 2, 3, pipeline=2, schedule="zb-h1"), "deep-untied"),
    "tensor, sequence": (job_on(2, 4, True, 2, 3), "gpt"),
    "offloaded": (job_on(1, 4, False, 2, 3, offload_optimizer="cpu", offload_parameters="cpu"), "gpt"),
    "on disks": (job_on(1, 4, False, 2, 3, offload_optimizer="nvme", offload_parameters="nvme"), "gpt"),
}
FEW = ("all are near", "4 ranks", "one micro-batch", "offloaded")
CASES = [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in LAYOUTS]


def near(job: Job) -> Job:
    return replace(job, secondary_ranks=2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_changes_no_bit(name: str, dtype: str) -> None:
    job, flavour = LAYOUTS[name]
    found, plain = (train(each, flavour, DTYPES[dtype]) for each in (near(job), job))
    if job.offload_optimizer == "nvme":  # an update from disks leaves gradients as they are
        found, plain = (replace(each, gradients={}) for each in (found, plain))
    equal(found, plain)


@pytest.mark.parametrize("name", FEW)
def test_it_changes_no_bit_of_quantised_parameters(name: str) -> None:
    """Neighbours keep codes: what they mean is what it meant in the forward."""
    job, flavour = LAYOUTS[name]
    job = replace(job, quantize_parameters="int8")
    equal(train(near(job), flavour, DTYPES["bf16"]), train(job, flavour, DTYPES["bf16"]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("codes", [("none", "none"), ("int8", "none"), ("int8", "int4")], ids=str)
def test_what_is_sent_and_held_is_planned(name: str, codes: tuple[str, str]) -> None:
    job, flavour = LAYOUTS[name]
    job = replace(near(job), quantize_parameters=codes[0], quantize_gradients=codes[1])
    plan, across = planned(job, SHAPES[flavour], DTYPES["bf16"]), job.tensor * job.data
    found = run_ranks(
        job.ranks, second_step, job, flavour, DTYPES["bf16"], tensor=job.tensor, pipeline=job.pipeline, shard=2
    )
    for number, (sent, held) in enumerate(found):
        stage, expected = number // across, memory(plan, number // across, fused=False).held
        assert traffic(plan, stage, number % across // job.tensor) == sent, f"rank {number}"
        for category in ("secondary", "pool", "parameters", "nvme_parameters"):
            assert held.get(category, 0) == expected.get(category, 0), (number, category)
        assert held["secondary"]


def test_what_crosses_hosts_is_sent_once_a_step() -> None:
    """P in the place of 2 m P less the ends, whatever the micro-batches."""
    one, four = (planned(near(job_on(1, 4, False, m, 3)), SHAPES["deep"], DTYPES["bf16"]) for m in (1, 4))
    plain = planned(job_on(1, 4, False, 4, 3), SHAPES["deep"], DTYPES["bf16"])
    far, more, before = (traffic(job)["data"]["parameters"] for job in (one, four, plain))
    assert far == more < before / 6


def changed(grid: Grid, job: Job) -> tuple[Tensor, Tensor, Tensor]:
    """A weight before and behind a step, and behind a change by hand."""
    rank = Rank(grid, job, SHAPES["gpt"], DTYPES["fp32"])
    rank.engine.begin_step()
    rank.passes(0)
    unit = rank.engine.units[0]
    name = unit.layout.intervals[0].name

    def seen() -> Tensor:
        rank.engine.gather.unshard([unit])
        value = unit.parameters.value(name).clone()
        rank.engine.gather.reshard([unit])
        return value

    before = seen()
    rank.engine.finish_step(lr=1e-1)
    after = seen()
    rank.engine.gather.unshard([unit])
    unit.parameters.value(name).fill_(3.0)
    unit.parameters.keep_changes([name])
    rank.engine.gather.reshard([unit])
    return before, after, seen()


def test_what_changes_is_gathered_from_all() -> None:
    for before, after, by_hand in run_ranks(4, changed, near(job_on(1, 4, False, 1, 3)), shard=2):
        assert not torch.equal(before, after) and (by_hand == 3.0).all()


@pytest.mark.parametrize("option", ["zero.quantize", "zero.secondary_ranks"])
def test_an_extension_that_was_taken_out_is_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.EXTENSIONS, option)
    job = replace(near(LAYOUTS["all are near"][0]), quantize_gradients="int8")
    config = config_of(job, SHAPES["deep"], DTYPES["bf16"])
    with pytest.raises(UserError, match=f"{option}: this copy of megazero has no such extension") as caught:
        registry.extensions_of(config, single(), REFERENCE, DTYPES["bf16"], torch.device("cpu"))
    assert "\n" not in str(caught.value)
