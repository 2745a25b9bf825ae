"""`megazero simulate`: what one rank without any other counts is what that rank of a real run counts, to the byte."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero.__main__ import main
from megazero.builders.assemble import build, feeds_of
from megazero.comm.fake_group import alone
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.config.file import load
from megazero.data.batch import MicroBatch
from megazero.kernels.operations import REFERENCE, Operations
from megazero.kernels.select import choose
from megazero.observe.allocations import Allocations
from megazero.plan.job import Job
from megazero.tools.dry_run.dry_run import Simulated, simulate, two_steps
from megazero.tools.dry_run.report import as_planned
from megazero.tools.dry_run.timeline import RecordingLedger, by_origin
from megazero.tools.training.launch import launch
from megazero.zero.placement import Precision
from tests.layouts import CPU, SHAPES, Wires, config_of, disks_of, ids, job_on, pairwise, rewired
from tests.ranks import run_ranks
from tests.tiny_run import ROOT, TinyData

DTYPES = {
    "fp32": Precision(),
    "fp64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float16),
}
KERNELS = {"fp32": choose("auto", CPU, torch.float32), "bf16": choose("auto", CPU, torch.bfloat16)}

Counted = dict[str, Any]


def real(grid: Grid, layout: Job, wires: Wires, flavour: str, dtype: str) -> Counted:
    """What a rank counts in two steps among the others."""
    grid, config, shape = rewired(grid, wires), config_of(layout, SHAPES[flavour], DTYPES[dtype]), SHAPES[flavour]
    ledger = grid.comm.ledger
    homes = {"nvme": disks_of(grid)} if layout.uses_disks else {}
    built = build(config, grid, CPU, KERNELS.get(dtype, REFERENCE), Host(CPU, ledger, apart=True), homes=homes)
    feed = feeds_of(grid["tensor"], CPU, layout.sequence)
    built.engine.loss_scale.scale.fill_(1.0)  # fp16's first one overflows, and a skipped update leaves disks alone
    for number in range(2):
        batches = [zeros(shape.seq_len, layout.micro_batch) for _ in range(layout.micro_batches)]
        with Allocations() as counted:
            built.engine.begin_step()
            built.pipeline.train(batches, lambda batch, number=number: feed(batch, number, True))
            done = built.engine.finish_step(1e-3)
        assert not done.skipped
    found = {"bytes": ledger.bytes_as_dict(), "traffic": ledger.traffic_as_dict(), "activations": counted.peak}
    built.engine.flush_delayed()  # an update that may be under way ends before its thread does
    built.engine.gather.finish()  # the next call uses the same connections
    found["bytes"].pop("host_pieces", None)  # as much as the disks' speed asks for
    found["traffic"].get("disk", {}).pop("initial values out", None)  # which a simulated rank has not
    return found


def zeros(length: int, micro: int) -> MicroBatch:
    tokens, targets = (torch.zeros(length, micro, dtype=torch.int64) for _ in range(2))
    return MicroBatch(tokens, targets, torch.ones_like(tokens, dtype=torch.bool), None, None, torch.arange(micro))


def simulated(rank: int, layout: Job, wires: Wires, flavour: str, dtype: str) -> Counted:
    """The same of the rank alone."""
    ops: Operations = KERNELS.get(dtype, REFERENCE)
    with FakeTensorMode():
        axes: dict[str, Any] = {"tensor": layout.tensor, "pipeline": layout.pipeline, "bucket": wires.bucket}
        axes["shard_ranks"] = layout.neighbours
        grid = rewired(alone(rank, layout.ranks, backend="gloo", ledger=RecordingLedger(), **axes), wires)
        host = Host(CPU, grid.comm.ledger, apart=True)
        found = two_steps(config_of(layout, SHAPES[flavour], DTYPES[dtype]), grid, ops, host, "cpu")
    held = found.ledger.bytes_as_dict()
    activations = held.pop("activations")["peak"]
    assert activations == found.steady.timeline.peak
    check_plan(found)
    return {"bytes": held, "traffic": found.ledger.traffic_as_dict(), "activations": activations}


def check_plan(found: Simulated) -> None:
    """The formulas say the same: memory of the passes within 3 %, traffic to the byte.

    An update's own working memory, which the formulas leave out, is the most only in models as small as these. Over
    sockets messages are kept until the step ends.
    """
    most = max(as_planned(peak) for peak, _ in found.steady.timeline.stretches() if peak.place.action != "update")
    messages = sum(sent.bytes_sent for sent in found.steady.traffic.get("pipeline", {}).values())
    assert 0.97 * found.planned.peak <= most <= 1.03 * found.planned.peak + messages
    sent = {axis: {p: s.bytes_sent for p, s in of.items() if s.bytes_sent} for axis, of in found.steady.traffic.items()}
    assert found.planned_traffic == {axis: purposes for axis, purposes in sent.items() if purposes}


# tensor, data, pipeline, sequence; stage; schedule; recompute; what rests elsewhere; flavour; dtype
GRIDS = [(1, 1, 1, False), (2, 1, 1, False), (2, 1, 1, True), (1, 2, 1, False), (2, 2, 1, True), (1, 4, 1, False)]
GRIDS += [(1, 1, 2, False), (1, 2, 2, False), (2, 1, 2, True)]
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
ELSEWHERE = {
    "nothing": {},
    "Pa": {"partition": True},
    "Pa+cpu": {"partition": True, "offload": "cpu"},
    "Pa+nvme": {"partition": True, "offload": "nvme"},
    "optimizer": {"offload_optimizer": "cpu"},
    "delayed": {"offload_optimizer": "cpu", "delayed": True},
    "all": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "optimizer on disks": {"offload_optimizer": "nvme"},
    "all on disks": {"offload_optimizer": "nvme", "offload_parameters": "nvme"},
}
CASES = [
    (grid, stage, schedule, recompute, elsewhere, flavour, dtype)
    for grid in GRIDS
    for stage in range(4)
    for schedule in SCHEDULES
    if grid[2] > 1 or schedule == "1f1b"
    for recompute in ("none", "selective", "full")
    for elsewhere in ELSEWHERE
    if (recompute == "full" or not elsewhere.startswith("Pa"))
    and (stage == 3 or not elsewhere.startswith("all"))
    and (stage or elsewhere not in ("optimizer", "delayed", "optimizer on disks"))
    for flavour in ("deep", "deep-untied")
    for dtype in DTYPES
]
COVER = pairwise(CASES)
FEW = 1  # of each list, with most pairs of values


def check(grid: tuple, stage: int, schedule: str, recompute: str, elsewhere: str, flavour: str, dtype: str) -> None:
    """Over sockets where there is a pipeline: in shared memory what comes early is kept, or not, by chance."""
    tensor, data, pipeline, sequence = grid
    ways = {"pipeline": pipeline, "schedule": schedule, "chunks": SCHEDULES[schedule]}
    layout = job_on(tensor, data, sequence, 2, stage, recompute=recompute, **ways, **ELSEWHERE[elsewhere])
    wires = Wires(sockets=pipeline > 1)
    ranks = run_ranks(layout.ranks, real, layout, wires, flavour, dtype, tensor=tensor, pipeline=pipeline)
    for rank, counted in enumerate(ranks):
        by_itself = simulated(rank, layout, wires, flavour, dtype)
        if layout.uses_disks:  # gradients are widened window by window, and those of the real disk are short
            for found in (by_itself, counted):
                found["bytes"].pop("host_staging", None)
        assert by_itself == counted, f"rank {rank}"


ON_DISKS = [
    ((1, 2, 1, False), 3, "1f1b", "none", "all on disks", "deep", "bf16"),
    ((2, 1, 1, False), 1, "1f1b", "full", "Pa+nvme", "deep", "bf16"),
]


@pytest.mark.parametrize("case", [*COVER[:FEW], *ON_DISKS[:FEW]], ids=ids([*COVER[:FEW], *ON_DISKS[:FEW]]))
def test_a_rank_alone_counts_what_it_counts_among_others(case: tuple) -> None:
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", [*COVER[FEW:], *ON_DISKS[FEW:]], ids=ids([*COVER[FEW:], *ON_DISKS[FEW:]]))
def test_so_does_every_other_layout(case: tuple) -> None:
    check(*case)


ON_NCCL = [
    ("parallel.pipeline=8", "batch.global=64"),
    ("parallel.pipeline=2", "pipeline.schedule=zb-v", "zero.stage=2"),
    ("parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true", "zero.stage=3", "memory.recompute=full"),
    ("parallel.pipeline=4", "pipeline.schedule=interleaved", "precision.dtype=fp32"),
    ("parallel.pipeline=4", "pipeline.schedule=zb-h1", "parallel.tensor=2", "zero.offload.optimizer=cpu"),
]


@pytest.mark.parametrize("options", [ON_NCCL[0], *(pytest.param(o, marks=pytest.mark.full) for o in ON_NCCL[1:])])
def test_many_micro_batches_need_what_the_formulas_say(options: tuple[str, ...]) -> None:
    """Nothing that was sent is kept for longer than it takes to go."""
    sizes = ["batch.micro=1", "batch.global=32", "model.layers=8", "precision.dtype=bf16"]
    config = load("tiny", [*sizes, *options])
    for rank in (0, 7):
        found = simulate(config, rank, 8, "cuda")
        moments = [peak for peak, _ in found.steady.timeline.stretches() if peak.place.action != "update"]
        assert found.planned.peak == pytest.approx(max(map(as_planned, moments)), rel=0.03)


REPEATING = [
    ("parallel.pipeline=4", "zero.stage=1"),
    *(
        pytest.param(options, marks=pytest.mark.full)
        for options in (
            ("zero.stage=0",),
            ("zero.stage=2", "model.dropout=0.1"),
            ("zero.stage=3", "memory.recompute=full"),
            ("parallel.pipeline=4", "zero.stage=3", "parallel.tensor=2", "parallel.sequence=true"),
            ("parallel.pipeline=2", "pipeline.schedule=interleaved", "pipeline.chunks=2", "zero.stage=2"),
            ("parallel.pipeline=2", "pipeline.schedule=zb-h1", "zero.stage=1", "zero.offload.optimizer=cpu"),
            ("parallel.pipeline=2", "pipeline.schedule=zb-v", "pipeline.chunks=2", "zero.stage=2"),
            ("parallel.pipeline=2", "pipeline.schedule=gpipe", "zero.stage=1"),
        )
    ),
]


@pytest.mark.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.full)])
@pytest.mark.parametrize("options", REPEATING)
def test_what_repeats_is_counted_as_often(
    options: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("tiny", ["batch.micro=1", "batch.global=48", "model.layers=4", "precision.dtype=bf16", *options])
    for rank in (0, 3):
        short = simulate(config, rank, 8, device)
        with monkeypatch.context() as patched:
            patched.setattr("megazero.tools.dry_run.dry_run._enough", lambda actions, number, *rest: number)
            whole = simulate(config, rank, 8, device)
        assert short.micro_batches == whole.micro_batches == whole.simulated
        assert short.simulated < whole.simulated or config.pipeline.schedule == "gpipe"
        for one, other in ((short.first, whole.first), (short.steady, whole.steady)):
            assert (one.traffic, one.timeline.peak) == (other.traffic, other.timeline.peak)
            (peak, live), (whole_peak, whole_live) = one.timeline.peak_live(), other.timeline.peak_live()
            assert peak == whole_peak and sorted(by_origin(live)) == sorted(by_origin(whole_live))
        assert short.ledger.traffic == whole.ledger.traffic and short.ledger.bytes == whole.ledger.bytes


def test_a_delayed_update_computes_nothing_in_a_dry_run() -> None:
    """Its thread would work on tensors without numbers outside of the mode that makes them."""
    delayed = ["zero.stage=2", "zero.offload.optimizer=cpu", "zero.offload.delayed=true", "batch.micro=1"]
    assert simulate(load("tiny", delayed), 0, 2, "cuda").steady.traffic["host"]


def by_the_verb(capsys: pytest.CaptureFixture[str], *arguments: object) -> Counted:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("zero.stage=2", "data.mask_eod=true"), id="data"),
        pytest.param(
            ("parallel.tensor=2", "parallel.sequence=true", "parallel.tensor_chunks=3", "memory.recompute=full"),
            id="tensor",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_verb_says_what_a_run_s_ledger_says(
    options: tuple[str, ...], tiny_data: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run from the command line: bytes of all categories, and traffic of the axes that only steps use."""
    steps = 3
    config = tiny_data.load(tmp_path / "run", *options, f"run.steps={steps}", "data.valid=null")
    assert launch(config, "small", 2) == 0
    capsys.readouterr()
    for row in json.loads((tmp_path / "run" / "ledger.json").read_text()):
        given = ["--config", tiny_data.config, "--gpus", 2, "--rank", row["rank"], "--device", "cpu", *options]
        found = by_the_verb(capsys, *given)
        row["bytes"].pop("checkpoint")  # which a simulated rank has no need of
        assert found["bytes"] == row["bytes"]
        traffic = {axis: row["traffic"].get(axis, {}) for axis in ("tensor", "data")}
        for axis, purposes in traffic.items():
            ours = found["steady"]["traffic"].get(axis, {})
            assert {p: {kind: steps * n for kind, n in sent.items()} for p, sent in ours.items()} == purposes


# A model of which a rank of two stages has a block and the head.
SMALL = ["--config", "tiny", "--gpus", "8", "--rank", "7", "model.layers=2", "model.hidden=64", "model.seq_len=32"]
SMALL += ["parallel.tensor=2", "parallel.pipeline=2", "memory.recompute=full", "precision.dtype=bf16", "batch.micro=1"]


def test_what_the_verb_shows(capsys: pytest.CaptureFixture[str]) -> None:
    found = by_the_verb(capsys, *SMALL)
    assert found["axes"]["pipeline"] == {"rank": 1, "size": 2} and found["gpus"] == 8
    for step in (found["first"], found["steady"]):
        peak, timeline = step["peak"], step["timeline"]
        assert peak["total"] == sum(peak["bytes"].values()) == max(part["peak_bytes"] for part in timeline)
        assert peak["action"].startswith("backward of micro-batch") and peak["operation"].startswith("aten.")
        assert {part["part"] for part in timeline} >= {"blocks.1", "head"}
        assert timeline[-1]["action"] == "update"
    made = sum(origin["bytes"] for origin in found["steady"]["peak"]["made"])
    held = found["steady"]["peak"]["bytes"]
    assert made == held["activations working"] + held["activations kept"] == found["steady"]["activations"]
    assert main(["simulate", *SMALL]) == 0
    text = capsys.readouterr().out
    for words in ("rank 7 of 8 on cuda", "at the peak of a step", "the peak is in backward", "block forward"):
        assert words in text


def test_commands_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """All but the one of 400 ranks, which has a test of its own."""
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    python -m megazero (simulate .*)$", page, re.MULTILINE)
    assert commands.pop(0) == "simulate --config gpt170b.yaml --gpus 400 --rank 17" and len(commands) == 2
    for command in commands:
        assert main(command.split()) == 0 and "activations" in capsys.readouterr().out


def test_what_cannot_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--rank", "8"]) == 2
    assert capsys.readouterr().err.startswith("MZ-100 simulate: ")


@pytest.mark.full
def test_170_billion_parameters_on_400_ranks_need_less_than_2_gb() -> None:
    """In a process of its own, whose peak is its own."""
    program = "import resource, sys; from megazero.__main__ import main; assert main(sys.argv[1:]) == 0;"
    program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    command = [sys.executable, "-c", program, "simulate", "--config", "gpt170b.yaml", "--gpus", "400", "--rank", "17"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert int(done.stderr.split()[-1]) * 1024 < 2e9
    assert found["steady"]["peak"]["total"] > 20e9
    assert found["steady"]["traffic"]["tensor"]["inputs"]["ops"] == 212
