"""`megazero plan`: the contract's object, its faults, hardware files, what a run says beside its plan."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero.__main__ import main
from megazero.base.errors import UserError
from megazero.builders.job import job_of, options_of
from megazero.config.file import load
from megazero.config.flat import spelt
from megazero.plan.machines import MACHINES, Disk, Link, Machine
from megazero.plan.systems import SYSTEMS, TIME_ERROR, UNCERTAINTY
from megazero.plan.time import step_time
from megazero.tools.doctor.hardware import as_yaml
from megazero.tools.planning.job import find, plan
from megazero.tools.planning.machine_file import machine_of
from megazero.tools.planning.report import rounded
from megazero.tools.training.launch import launch
from tests.tiny_run import PARAMETERS, ROOT, TinyData, command

MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")
TIME = ("step_s", "tokens_per_second_per_device", "tflops_per_device", "mfu", "hfu")


def answer(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(["plan", *line]) == 0
    return capsys.readouterr().out


def test_the_contract_s_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(answer(capsys, "--config", "gpt170b", "--gpus", "400", "--hardware", "v100-32gb", "--json"))
    assert found["parameters"] == 171_167_916_032 or found["parameters"] // 10**9 == 171
    assert {f"{name}_bytes" for name in MEMORY} <= found["memory"].keys()
    assert len(found["memory"]["ranks"]) == 1 and found["fits"] is True
    assert set(TIME) <= found["time"].keys() and found["bubble"] == 0
    made = found["memory"]["communicators"]
    assert [one["name"] for one in made] == ["world", "data", "tensor"]
    assert sum(one["bytes"] for one in made) == found["memory"]["categories"]["communicators"]
    assert found["traffic"]["data"]["gradients"] > 0 and found["time"]["hfu"] > found["time"]["mfu"]
    assert found["memory"]["settings"].keys() == {"none", "selective", "full", "full, Pa", "full, Pa+cpu"}
    sums = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")
    assert sum(found["memory"][name] for name in sums) == found["memory"]["peak_bytes"]
    assert sum(found["time"]["parts"].values()) == pytest.approx(found["time"]["step_s"])


def test_all_that_is_held_is_in_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    """Second shards, and what quantised gradients have lost."""
    line = ("--config", "gpt13b", "--gpus", "16", "--hardware", "a100-80gb", "zero.stage=3", "zero.secondary_ranks=8")
    line = (*line, "precision.dtype=bf16", "zero.quantize.gradients=int4", "zero.quantize.error_feedback=true")
    found = json.loads(answer(capsys, *line, "--json"))["memory"]
    assert min(found["categories"][name] for name in ("secondary", "residuals")) > 0
    sums = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")
    assert sum(found[name] for name in sums) == found["peak_bytes"]


def test_a_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", "gpt13b", "--gpus", "16", "--hardware", "a100-80gb", "parallel.pipeline=4", "parallel.tensor=2")
    text = answer(capsys, *line, "--tokens", "3e11")
    said = "NCCL communicators on the fullest rank; their memory is estimated, not measured"
    for part in ("pipeline rank", "full, Pa+cpu", "tensor", "MFU", "3e+11 tokens", "bubble", UNCERTAINTY, *said):
        assert part in text, part
    assert re.search(r"^  communicators  ( +\d\.\d{3}){4}$", text, re.MULTILINE)


def test_a_plan_s_text_says_no_more_of_its_times_than_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Two digits, where the JSON has all."""
    line = ("--config", "gpt13b", "--gpus", "16", "--hardware", "a100-80gb")
    text, found = answer(capsys, *line), json.loads(answer(capsys, *line, "--json"))
    (said,) = re.findall(r"a step: (\S+) s;", text)
    assert float(said.replace(",", "")) == float(f"{found['time']['step_s']:.2g}") != found["time"]["step_s"]
    assert found["uncertainty"] == {"time": TIME_ERROR, "meaning": UNCERTAINTY}
    assert [rounded(value) for value in (41.97, 0.0123456, 1834.2, 123456789.0, 0.0)] == [
        "42",
        "0.012",
        "1,800",
        "120,000,000",
        "0",
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_plan_as_another_system_trains(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--config",
        "gpt13b",
        "--gpus",
        "16",
        "--hardware",
        "h100-80gb",
        "parallel.tensor=2",
        "parallel.sequence=true",
    )
    ours, found = (json.loads(answer(capsys, *line, "--json", *more)) for more in ((), ("--system", system)))
    assert found["system"] == system and (found == ours) == (system == "ours")
    assert sum(found["memory"]["categories"].values()) - found["memory"]["host_bytes"] == found["memory"]["peak_bytes"]
    assert (f"as {system} trains" in answer(capsys, *line, "--system", system)) == (system != "ours")


def test_a_search_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", "gpt13b", "--gpus", "8", "--hardware", "a100-80gb", "--search", "batch.micro=1")
    text = answer(capsys, *line)
    assert "layouts tried" in text and "zero.stage=" in text and "TFLOP/s" in text
    given = {"batch.micro=1", "parallel.pipeline=1", "memory.offload=false"}
    assert not given & set(text.split()), "what the config says anyway is not shown"
    found = json.loads(answer(capsys, *line, "--json"))
    assert len(found["best"]) == 10 and found["best"][0]["step_s"] <= found["best"][-1]["step_s"]


SEARCHED = [("gpt13b", 16), pytest.param("llama8b", 8, marks=pytest.mark.full)]
SEARCHED += [pytest.param("gpt170b", 400, marks=pytest.mark.full)]


@pytest.mark.parametrize(("name", "gpus"), SEARCHED)
def test_what_a_search_finds_can_be_run(name: str, gpus: int) -> None:
    """Every layout is a config that validation takes, and its plan is the one that was found."""
    config = load(name, ["batch.micro=1", "batch.global=400"])
    for found in find(config, gpus, MACHINES["v100-32gb"] if gpus == 400 else MACHINES["a100-80gb"]).best:
        given = [f"{option}={spelt(value)}" for option, value in options_of(found.job).items()]
        again = plan(load(name, ["batch.global=400", *given]), gpus, MACHINES["a100-80gb"])
        assert again.job == found.job and again.fullest.peak >= found.fullest.peak


FAULTS = [
    (["--hardware", "v1000"], "MZ-116 v1000"),
    (
        ["--hardware", "a100-80gb", "--system", "megatron"],
        "MZ-100: argument --system: invalid choice: 'megatron' (choose from 'ours', ",
    ),
    (
        ["--hardware", "a100-80gb", "--search", "--system", "fsdp"],
        "MZ-100 plan: --search takes neither --tokens nor --system",
    ),
    (["--hardware", "v100-32gb", "precision.dtype=fp64", "--gpus", "0"], "MZ-100"),
    (["--hardware", "a100-80gb", "--gpus", "3", "parallel.tensor=2"], "MZ-106"),
]


@pytest.mark.parametrize(("line", "said"), FAULTS)
def test_faults(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [] if "--gpus" in line else ["--gpus", "4"]
    assert main(["plan", "--config", "tiny", *gpus, *line]) == 2
    assert said in capsys.readouterr().err


def test_all_that_is_missing_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny"]) == 2
    assert "MZ-100: the following arguments are required: --gpus, --hardware" in capsys.readouterr().err


def test_a_machine_without_a_peak() -> None:
    machine = replace(MACHINES["a100-80gb"], peak_flops={"bf16": 1e14})
    with pytest.raises(UserError, match="MZ-118"):
        plan(load("tiny", ["precision.dtype=fp64"]), 1, machine)


def test_nothing_fits() -> None:
    with pytest.raises(
        UserError,
        match=r"MZ-341 .*the least need is .* GB of 32\.\d, of the host .*, "
        r"of the disks 2,\d+\.\d GB of 1,756\.2; use more",
    ):
        find(load("gpt170b", ["batch.micro=1", "precision.dtype=fp16"]), 1, MACHINES["v100-32gb"])
    with pytest.raises(UserError, match=r"MZ-341 .*batch\.global 256 cannot be spread over 257 ranks evenly"):
        find(load("gpt13b"), 257, MACHINES["a100-80gb"])


@pytest.mark.full
def test_offload_that_gains_nothing_is_not_among_the_best() -> None:
    found = find(load("gpt100b"), 48, MACHINES["a100-80gb"])
    assert len(found.best) == 10
    times = [round(one.time.step_s, 9) for one in found.best]
    twins = [b for a, b, x, y in zip(found.best, found.best[1:], times, times[1:], strict=False) if x == y]
    assert not any(one.job.optimizer_away or one.job.parameters_away for one in twins)


def test_attention_is_slower_than_products_where_a_file_does_not_say(tmp_path: Path) -> None:
    """Nothing is then faster than the device."""
    path = tmp_path / "measured.yaml"
    text = (ROOT / "docs/planning.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    path.write_text(text[: text.index("reached:")])
    layout = job_of(load("llama8b", ["batch.micro=1"]), 8)
    layout = replace(layout, shape=replace(layout.shape, seq_len=65_536), recompute="full")
    assert step_time(layout, machine_of(str(path))).hfu < 1


MEASURED = {
    "name": 'a "machine"',
    "memory_bytes": 2**34,
    "peak_flops": {"fp32": 1e11},
    "memory_bandwidth": 1e10,
    "devices_per_node": 2,
    "in_node": {"bandwidth": 1e9, "latency": 1e-5},
    "cross_node": {"bandwidth": 1e8, "latency": 1e-4},
    "host_link_bandwidth": 5e9,
    "host_memory_bytes": 2**33,
}


def written(path: Path, **more: Any) -> Machine:
    path.write_text(as_yaml(MEASURED | more))
    return machine_of(str(path))


def test_what_doctor_writes_is_read(tmp_path: Path) -> None:
    machine = written(tmp_path / "mine.yaml", launch=3e-6, reached={"attention": 0.3})
    assert (machine.memory_bytes, machine.peak_flops, machine.devices_per_node) == (2**34, {"fp32": 1e11}, 2)
    assert (machine.in_node, machine.cross_node) == (Link(1e9, 1e-5), Link(1e8, 1e-4))
    assert machine.host_link_bandwidth == 5e9
    assert (machine.launch, machine.reached.attention, machine.reached.matmul) == (3e-6, 0.3, 1.0)
    assert machine.name == MEASURED["name"]
    assert plan(load("tiny"), 1, machine).time.step_s > 0


def test_ranks_of_a_cpu_compute_nothing_while_they_exchange_bytes(tmp_path: Path) -> None:
    job = job_of(load("tiny", ["batch.micro=4", "zero.stage=1"]), 2)
    beside = step_time(job, written(tmp_path / "gpu.yaml", nccl_channels=24))
    alone = step_time(job, written(tmp_path / "cpu.yaml", nccl_channels=0, reached={"beside": 0.0}))
    assert beside.hidden["data"] > 0 == alone.hidden["data"]
    assert alone.step_s == pytest.approx(beside.step_s + beside.hidden["data"])


def test_a_field_that_no_machine_has(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(as_yaml(MEASURED) + "\ncolour: red\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"MZ-117 mine\.yaml: colour: unexpected field \(1 faults\)"):
        machine_of(str(path))


@pytest.mark.parametrize("text", ["name: [", "name: mine\n", "- 1\n", "name: 1\nmemory_bytes: -1\n"])
def test_a_file_that_is_wrong(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"MZ-117 mine\.yaml"):
        machine_of(str(path))


def test_a_run_says_what_it_holds_beside_its_plan(tiny_data: TinyData, tmp_path: Path) -> None:
    done = command(
        "-m", "megazero", "train", "--config", str(tiny_data.config), "run.steps=2", f"run.dir={tmp_path / 'run'}"
    )
    assert done.returncode == 0, done.stderr
    assert "memory of rank 0: " in done.stdout and "warning" not in done.stderr
    written = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    held = written["pipeline_ranks"][0]["memory"]["held"]
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))[0]["bytes"]
    for category in ("parameters", "gradients", "optimizer"):
        assert held[category] == ledger[category]["peak"]


def test_a_checkpoint_has_the_bytes_of_a_real_one(tiny_data: TinyData, tmp_path: Path) -> None:
    assert launch(tiny_data.load(tmp_path, "run.steps=1", "data.valid=null"), "small", 1) == 0
    found = plan(tiny_data.load(tmp_path), 1, MACHINES["h200"]).checkpoint
    written = sum(path.stat().st_size for path in tmp_path.rglob("shard_*.safetensors"))
    assert found.bytes == 12 * PARAMETERS and found.bytes < written < 1.02 * found.bytes


def test_a_save_is_as_slow_as_the_disk_and_leads_the_signal(tmp_path: Path) -> None:
    def lead(name: str, ranks: int, machine: Machine) -> tuple[float, int]:
        found = plan(load(name), ranks, machine).checkpoint
        assert found.measured == (machine.name == "mine")
        return found.save_s, found.lead_s

    h200 = MACHINES["h200"]
    saved, seconds = lead("gpt13b", 8, h200)  # one node, 152 GB
    assert 152 < saved < 157 and 1.5 * saved + 30 < seconds
    again, later = lead("gpt13b", 16, h200)
    assert again == pytest.approx(saved / 2, rel=0.01) and 120 <= later < seconds
    faster = replace(h200, name="mine", disk=Disk(10**12, 4e9, 4e9))  # of each device
    assert lead("gpt13b", 8, faster)[0] < saved / 10
    assert lead("tiny", 1, h200)[1] == 120


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [("2048", 1), ("2049", 2), ("2K", 1), ("300b", 146_484_375), ("1e9", 488_282), ("1.5T", 732_421_875)],
)
def test_a_budget_of_tokens(capsys: pytest.CaptureFixture[str], tokens: str, steps: int) -> None:
    line = ("--config", "tiny", "--gpus", "1", "--hardware", "h200", "--tokens", tokens)
    budget = json.loads(answer(capsys, *line, "--json"))["budget"]
    assert budget["steps"] == steps and budget["hours"] == pytest.approx(24 * budget["days"])
    text = answer(capsys, *line)
    assert f" tokens: {steps:,} steps,\n" in text and " hours, " in text and " days, " in text
    assert re.search(r"^a checkpoint: 0.1212 GB, saved in [\d.]+ s at 1 GB/s from each node \(assumed\); ", text, re.M)


def test_a_budget_of_a_config_with_stages() -> None:
    stages = ["run.steps=10", "batch.global=8", "stages=[{until_step: 4, batch: {global: 4}}]"]
    config, h200 = load("tiny", stages), MACHINES["h200"]
    assert plan(config, 1, h200).steps == 10
    for tokens, steps in (
        (1024, 1),
        (4 * 1024, 4),
        (4 * 1024 + 1, 5),
        (4 * 1024 + 2048, 5),
        (4 * 1024 + 30 * 2048, 34),
    ):
        assert plan(config, 1, h200, float(tokens)).steps == steps


@pytest.mark.parametrize("wrong", ["0", "5X", "B", "-1B", "nan"])
def test_what_is_no_number_of_tokens(capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    assert main(["plan", "--config", "tiny", "--gpus", "1", "--hardware", "h200", f"--tokens={wrong}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("MZ-100: argument --tokens: expected a number ") and err.count("\n") == 1


def test_where_memory_is_highest_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--gpus", "64", "--hardware", "a100-80gb")
    said = answer(capsys, "--config", "gpt13b", *line, "parallel.pipeline=8")
    where = "memory is highest in backward, while the fullest rank computes the gradient of"
    assert f"\n{where} the gelu\n" in said and "most is in" not in said
    assert f"\n{where} the loss\n" in answer(capsys, "--config", "llama8b", *line)
