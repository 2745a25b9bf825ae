"""Any grid reads what any grid wrote: every ordered pair of sixteen layouts of up to eight ranks."""

from pathlib import Path

import pytest
import torch

from megazero.tools.certify.tolerances import LOSS_FP32, difference
from megazero.zero.placement import Precision
from tests.checkpoint.grids import AHEAD, Loaded, load_all, logical_state, options, save_after
from tests.layouts import GLOBAL_BATCH, job_on
from tests.ranks import run_ranks

FP32 = Precision()
STEPS = 1
LAYOUTS = {
    "one": job_on(accumulation=4),
    "dp2-stage1": job_on(data=2, accumulation=2, stage=1),
    "dp4-stage0": job_on(data=4, accumulation=2, stage=0),
    "dp8-stage3": job_on(data=8, accumulation=1, stage=3),
    "dp2-stage2": job_on(data=2, accumulation=4, stage=2),
    "tp2": job_on(tensor=2, accumulation=4, stage=1),
    "tp4-sequence": job_on(tensor=4, sequence=True, accumulation=2, stage=1),
    "tp2-dp2-stage3": job_on(tensor=2, data=2, accumulation=2, stage=3),
    "pp2": job_on(pipeline=2, accumulation=4, stage=1),
    "pp2-interleaved-dp2-stage2": job_on(pipeline=2, schedule="interleaved", chunks=2, data=2, accumulation=4, stage=2),
    "pp4-zb-h1-dp2-stage3": job_on(pipeline=4, schedule="zb-h1", data=2, accumulation=4, stage=3),
    "tp2-pp2-zb-v-dp2-stage1": job_on(
        tensor=2, sequence=True, pipeline=2, schedule="zb-v", chunks=2, data=2, accumulation=4, stage=1
    ),
    "dp4-shard2-stage3": job_on(data=4, accumulation=2, stage=3, shard_ranks=2),
    "tp2-dp4-shard2-stage1": job_on(tensor=2, data=4, accumulation=2, stage=1, shard_ranks=2),
    "dp2-stage2-offload": job_on(data=2, accumulation=4, stage=2, offload_optimizer="cpu"),
    "tp2-dp2-stage3-offload": job_on(
        tensor=2, data=2, accumulation=2, stage=3, offload_optimizer="cpu", offload_parameters="cpu"
    ),
    "dp2-stage1-nvme": job_on(data=2, accumulation=4, stage=1, offload_optimizer="nvme"),
    "tp2-dp2-stage3-nvme": job_on(
        tensor=2, data=2, accumulation=2, stage=3, offload_optimizer="nvme", offload_parameters="nvme"
    ),
}


class Written:
    """What layouts of a flavour write: the folder of each, and the loss of its step after saving, when asked for."""

    def __init__(self, flavour: str, folder: Path):
        self.flavour, self._folder, self._losses = flavour, folder, dict[str, float]()

    def of(self, name: str) -> tuple[Path, float]:
        if name not in self._losses:
            layout = LAYOUTS[name]
            arguments = (layout, self.flavour, FP32, self._folder / name, STEPS)
            self._losses[name] = run_ranks(layout.ranks, save_after, *arguments, **options(layout))[0]
        return self._folder / name, self._losses[name]


@pytest.fixture(scope="module", params=["deep", pytest.param("deep-untied", marks=pytest.mark.full)])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(request.param, tmp_path_factory.mktemp("written"))


# One process reads what every grid wrote, and these, together, read it all once more.
READERS = (
    "tp2-dp2-stage3-nvme",
    "dp8-stage3",
    "dp4-shard2-stage3",
    "pp2-interleaved-dp2-stage2",
    "tp2-pp2-zb-v-dp2-stage1",
)
COVER = {
    "one": tuple(LAYOUTS),
    **{name: tuple(dict.fromkeys([name, *list(LAYOUTS)[k :: len(READERS)]])) for k, name in enumerate(READERS)},
}

# The quick half: one process reads a grid with each kind of split and home, a pipeline what one process wrote.
KINDS = ("one", "tp2", "pp2-interleaved-dp2-stage2", "dp4-shard2-stage3", "tp2-dp2-stage3-nvme")
QUICK = {"one": KINDS, "pp2-interleaved-dp2-stage2": ("one", "pp2-interleaved-dp2-stage2")}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *(pytest.param(name, others, id=f"{name}-{len(others)}") for name, others in QUICK.items()),
        *(
            pytest.param(name, others, id=f"{name}-{len(others)}", marks=pytest.mark.full)
            for name, others in COVER.items()
        ),
        *(pytest.param(n, tuple(LAYOUTS), id=n, marks=pytest.mark.full) for n in LAYOUTS if n != "one"),
    ],
)
def test_every_grid_reads_every_grid(written: Written, name: str, others: tuple[str, ...], tmp_path: Path) -> None:
    """Bitwise equal logical state, the same next 64 samples, and a next step as near as one process to another grid."""
    layout, folders = LAYOUTS[name], {other: written.of(other)[0] for other in others}
    ranks: list[dict[str, Loaded]] = run_ranks(
        layout.ranks, load_all, layout, written.flavour, FP32, folders, tmp_path, **options(layout)
    )
    for other in others:
        before, theirs = logical_state(folders[other])
        after, ours = logical_state(tmp_path / other)
        assert before.progress == after.progress
        for parameter, kinds in theirs.items():
            for kind, values in kinds.items():
                assert torch.equal(values, ours[parameter][kind]), f"{kind} of {parameter} from {other}"
        assert any(kinds["exp_avg_sq"].any() for kinds in theirs.values())
        found = [rank[other] for rank in ranks]
        samples = {id for rank in found for id in rank.samples}
        assert samples == set(range(STEPS * GLOBAL_BATCH, (STEPS + AHEAD) * GLOBAL_BATCH))
        loss = written.of(other)[1]
        assert len({rank.loss for rank in found}) == 1 and difference([found[0].loss], [loss]) <= LOSS_FP32
        if other == name:
            assert found[0].loss == loss, "the same grid goes on bit for bit"


def test_ranks_that_hold_all_save_equal_shares(tmp_path: Path) -> None:
    job = job_on(data=2, accumulation=4, stage=0)
    run_ranks(2, save_after, job, "deep", FP32, tmp_path, 1)
    one, other = (path.stat().st_size for path in sorted((tmp_path / "checkpoints").rglob("shard_*")))
    assert abs(one - other) < 0.05 * one
