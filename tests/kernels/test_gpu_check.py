"""The check of a machine's GPU, tried on the CPU: all it does but what a GPU alone does."""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.builders.pipeline import model_shape
from megazero.comm.grid import single
from megazero.comm.host import Host
from megazero.kernels import cpu, reference
from megazero.kernels.samples import FORMS, SAMPLES, Draw, distance, results
from megazero.plan.flops import flops_per_token
from megazero.plan.layers import parameters
from megazero.zero.engine import Engine
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import (
    attention,
    bandwidth,
    carry,
    correctness,
    layouts,
    machine,
    parts,
    peers,
    ranks,
    rates,
    speed,
    steps,
    train,
    waits,
)
from scripts.gpu_check.commands import ROOT
from scripts.gpu_check.findings import Asked, Row, line, markdown, summary
from scripts.gpu_check.layouts import config_of
from scripts.gpu_check.parts import PARTS, SECOND, SHOWN, Part

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
CPU = Asked(torch.device("cpu"), tiny=True)


def checked(target: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the check on the CPU; return its exit code and its report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gpu_check", "--device", "cpu", "--tiny", *words, "--json", str(target)])
        code = gpu_check.main()
    return code, json.loads(target.read_text())


def faults(report: dict[str, Any]) -> list[Row]:
    return [row for part in report["parts"].values() for row in part["rows"] if row.get("fault")]


@pytest.mark.full
@needs_gcc
def test_a_dry_run_of_all_of_it(tmp_path: Path) -> None:
    """By the command of docs/gpu.md, both calls."""
    target = tmp_path / "report.json"
    for words, names in (([], PARTS), (["--second"], SECOND)):
        line = ["scripts/gpu_check.sh", "--device", "cpu", "--tiny", "--json", target, *words]
        done = subprocess.run(
            line, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True
        )
        report = json.loads(target.read_text())
        assert faults(report) == [] and done.returncode == 0, done.stdout + done.stderr
        assert set(report["parts"]) == set(names) and all(part["rows"] for part in report["parts"].values())
        at = done.stdout.index("SUMMARY: 0 failures")
        assert len(done.stdout[at:]) < 12_000 and all(name in done.stdout[at:] for name in names)
        rows = {name: part["rows"] for name, part in report["parts"].items()}
        told = [
            row for part in rows.values() for row in part if "tokens_per_s" in row and "published" not in row["name"]
        ]
        assert told and all(row["step_s"] > 0 and math.isfinite(row["loss"]) for row in told)
        assert not [row for name in SHOWN for row in rows.get(name, []) if row.get("absent") and name != "rates"]
        tables = target.with_suffix(".md").read_text()
        assert all(f"## {part.title}" in tables for part in names.values()) and report["machine"]["commit"] in tables
        if words:
            continue
        assert {row["name"] for row in rows["correctness"]} == {"seed", *SAMPLES, *FORMS}
        assert {row["name"] for row in rows["bandwidth"] if "gb_per_s" in row} >= set(SAMPLES)
        assert [row["name"] for row in rows["waits"][1:]] == [case.name for case in waits.CASES]
        assert [row["steps"] for row in rows["train"] if "steps" in row] == [10, 5, 10]
        assert {name.split(", micro")[0] for name in (row["name"] for row in rows["gpt"])} >= set(steps.SYSTEMS)
        alone, *stages = rows["exchange"]
        assert alone["sent_gb"] == 0 and all(row["sent_gb"] > 0 and row["times_stage_0"] > 0 for row in stages)
        assert [row["calls"] for row in rows["sanitizer"]] == [3 * len(SAMPLES | FORMS)] * 2


def named(patch: pytest.MonkeyPatch, **rows: Any) -> None:
    """Make parts of functions that yield rows."""
    made = {name: Part(name, 20.0, name, alone=name == "machine") for name in rows}
    for module, name in ((parts, "ALL"), (gpu_check, "ALL"), (gpu_check, "PARTS")):
        patch.setattr(module, name, made)
    patch.setattr(Part, "rows", lambda part: rows[part.where])


def say(asked: Asked) -> Iterator[Row]:
    yield {"name": "one", "number": 1.0}


def broken(asked: Asked) -> Iterator[Row]:
    yield {"name": "before", "absent": "no such thing"}
    raise RuntimeError("it broke\nin two lines")


def gone(asked: Asked) -> Iterator[Row]:
    yield {"name": "before"}
    os._exit(3)


def hung(asked: Asked) -> Iterator[Row]:
    yield {"name": "before"}
    subprocess.run(["sleep", "600"], check=False)


def test_what_breaks_or_hangs_is_a_failure_and_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch, machine=say, broken=broken, gone=gone, hung=hung, last=say)
    monkeypatch.setitem(parts.ALL, "hung", Part("hung", 1.0, "hung"))
    code, report = checked(tmp_path / "report.json")
    found = {name: [row.get("fault") for row in part["rows"]] for name, part in report["parts"].items()}
    assert found == {
        "machine": [None],
        "broken": [None, "RuntimeError: it broke"],
        "gone": [None, "its process ended with 3"],
        "hung": [None, "not done within 1 s"],
        "last": [None],
    }
    assert code == 1 and report["failures"] == 3
    out = capfd.readouterr().out
    assert "not measured: no such thing" in out and "FAILED not done within 1 s" in out and "SUMMARY: 3 failures" in out
    kept = (tmp_path / "report.parts" / "gone.jsonl").read_text()
    assert json.loads(kept) == {"name": "before"}, "what a part had found is there, whatever became of it"


def test_a_check_without_time_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, machine=say, hung=hung, last=say)
    monkeypatch.setattr(parts, "LEAST", 0.5)
    monkeypatch.setitem(parts.LANES, "cpu", 1)
    begin = time.monotonic()
    code, report = checked(tmp_path / "report.json", "--seconds", "1.2")
    assert time.monotonic() - begin < 10
    assert code == 0 and faults(report) == []
    assert [part["rows"][-1].get("absent", "") for part in report["parts"].values()] == [
        "",
        "the rest: the check's time was over after 1 s",
        "all of it: the check's time was over",
    ]


def test_the_calls_end_within_their_minutes() -> None:
    """Of 540 s each, with some for the start; parts that measure have all of their time, the others in turns."""
    assert gpu_check.SECONDS <= 525
    for own in (PARTS, SECOND):
        alone = sum(part.limit for part in own.values() if part.alone)
        assert alone <= gpu_check.SECONDS, "what measures has time where the others need none"
    assert set(bandwidth.COMPILED) < set(SAMPLES) and len(bandwidth.COMPILED) < 6, "a compilation takes seconds"
    assert all(part.after in ("", "build") for part in PARTS.values()) and set(SHOWN) <= set(parts.ALL)


def test_the_page_has_a_row_for_each_part() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert [name for name, part in parts.ALL.items() if f"\n| `{name}` | {part.limit} | " not in page] == []


def lasts(asked: Asked) -> Iterator[Row]:
    begin = time.monotonic()
    time.sleep(0.3)
    yield {"name": "when", "begin": begin, "end": time.monotonic()}


def test_parts_that_measure_run_alone_and_others_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that follows another waits for it, while those behind it do not."""
    each = {"machine": say, "build": lasts, "follows": lasts, "free": lasts, "alone": lasts, "late": lasts}
    named(monkeypatch, **each)
    for name, how in {"follows": {"after": "build"}, "alone": {"alone": True}}.items():
        monkeypatch.setitem(parts.ALL, name, replace(parts.ALL[name], **how))
    _, report = checked(tmp_path / "report.json")
    when = {name: part["rows"][0] for name, part in report["parts"].items() if name != "machine"}
    assert when["free"]["begin"] < when["build"]["end"] <= when["follows"]["begin"]
    others = [row for name, row in when.items() if name != "alone"]
    assert all(row["end"] <= when["alone"]["begin"] or when["alone"]["end"] <= row["begin"] for row in others)


def test_a_summary_says_first_what_is_wrong() -> None:
    rows = [{"name": f"row {number}", "us": float(number)} for number in range(400)]
    wrong = {"name": "bad", "fault": "wrong " * 100}
    lacking = {"name": "nvcc", "absent": "no nvcc"}
    found = {"long": [*rows, wrong, lacking], "other": rows}
    report = {name: {"title": name.upper(), "seconds": 1.0, "rows": each} for name, each in found.items()}
    text = summary({"machine": {"gpu": "X"}, "failures": 1, "seconds": 9.0, "parts": report}, ["long"])
    first, fault, *lines = text.splitlines()
    assert first == "SUMMARY: 1 failures, 9 s; X" and fault.startswith("FAILED long: bad: wrong") and len(fault) == 260
    assert lines[:2] == ["long (1 s): 402 rows", "other (1 s): 400 rows, us <= 399"]
    assert lines[2:4] == ["not measured, long: nvcc: no nvcc", "-- LONG"] and lines[-1].endswith("lines more")
    assert 11_000 < len(text) < 12_000


def test_without_a_gpu_or_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each; what is missing is no failure, a device that is asked for is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (row,) = machine.rows(Asked(torch.device("cuda", 0), tiny=True))
    assert "torch sees no GPU; --device cpu" in row["fault"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # in the other one a library may lie ready
    code, report = checked(tmp_path / "report.json", "--only", "build", "correctness")
    assert code == 0 and report["machine"]["commit"] == "-"
    (row,) = report["parts"]["build"]["rows"]
    assert row["absent"].startswith("no g++ on this machine, and no built library in ")
    assert [row["absent"] for row in report["parts"]["correctness"]["rows"]] == ["see build"]


def test_rows_in_lines_and_tables() -> None:
    rows: list[Row] = [
        {"name": "a | b", "us": 1234.567, "each": [1], "of": None},
        {"name": "c", "size": "2x3", "fault": "wrong"},
    ]
    assert line(rows[0]).split() == ["a", "|", "b", "us", "1235"]
    part = {"title": "Things", "seconds": 1.2, "rows": rows}
    text = markdown({"machine": {"gpu": "X", "each": {}}, "failures": 1, "seconds": 2.0, "parts": {"things": part}})
    assert "| gpu | X |" in text and "each" not in text and "1 failures, 2 s" in text
    assert "## Things (1 s)\n\n|  | us |\n|---|---|\n| a / b | 1235 |\n\n|  | size |" in text
    assert "\n| c FAILED wrong | 2x3 |\n" in text and "FAILED wrong" in line(rows[1])


@needs_gcc
def test_a_wrong_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "results", lambda *arguments: (results(*arguments)[0] * 1.01,))
    monkeypatch.setattr(correctness, "SAMPLES", {"swiglu": SAMPLES["swiglu"]})
    monkeypatch.setattr(correctness, "FORMS", {})
    cpu.load()
    found = [row["fault"] for row in correctness.rows(CPU) if row["name"] == "swiglu"]
    assert len(found) == 3 and all("times what is allowed" in fault for fault in found)


def test_distance() -> None:
    """Half a unit of the result's own last place is allowed, one is not; NaN and infinities must agree."""
    exact = torch.tensor([1.0, -3.0], dtype=torch.float64)
    assert distance(torch.tensor([1.0, -3.0]), exact) == 0
    assert 0.9 < distance((exact + 0.0037).bfloat16(), exact + 0.0037) <= 1
    assert distance(torch.tensor([1.0078125, -3.0]).bfloat16(), exact) > 1
    assert distance(torch.tensor([1.0, math.nan]), exact) == math.inf
    assert distance(torch.tensor([1.0, -3.0]), torch.tensor([1.0, math.nan]).double()) == math.inf
    assert distance(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]).double()) == 0
    assert distance(torch.tensor([1.0, 5.0]), torch.tensor([1.0, math.inf]).double()) == math.inf


def test_bytes_that_must_move() -> None:
    """Of 4,096 elements: an update 30 each and three scalars read, one written; a norm 4 each, two parameters, one
    statistic a row.
    """
    generator, sizes = torch.Generator().manual_seed(0), bandwidth.TINY
    found = {}
    for name in ("adamw_", "rms_norm"):
        arguments = SAMPLES[name](Draw(torch.bfloat16, generator), sizes)
        found[name] = bandwidth.least_bytes(name, arguments, results(reference, name, arguments))
    rows = sizes.sequence * sizes.batch
    assert found["adamw_"] == 30 * sizes.flat + 4 * 4
    assert found["rms_norm"] == 4 * rows * sizes.hidden + 2 * sizes.hidden + 4 * rows


def test_the_models_have_the_published_sizes() -> None:
    """And cost what the planner says (PaLM's formula), worked out by hand: positions are no product."""
    shapes = [model_shape(config_of(ranks.PLAIN, each.model)) for each in (steps.GPT, steps.LLAMA, steps.SEVEN_B)]
    assert [parameters(shape) for shape in shapes] == [1_557_686_400, 1_235_814_400, 6_738_415_616]
    shape = model_shape(config_of(ranks.PLAIN, speed.GPT_1_3B.model))
    assert 1.3e9 < parameters(shape) < 1.35e9
    assert flops_per_token(shape) == 6 * (12 * 24 * 2048**2 + 50_304 * 2048) + 12 * 24 * 2048 * 2048


@pytest.mark.parametrize("shape", [steps.GPT, steps.LLAMA], ids=["gpt", "llama"])
def test_a_peer_is_the_same_model(shape: speed.Shape) -> None:
    """As many parameters of each kind: tied, with the same biases."""
    small = shape.of(CPU)
    ours = parameters(model_shape(config_of(ranks.PLAIN, small.model)))
    assert sum(each.numel() for each in peers.built(small, CPU.device).parameters()) == ours


def test_other_losses_are_a_failure() -> None:
    losses: list[float] = []
    found = [steps.agreed({"name": "x", "loss": loss}, losses) for loss in (5.52, 5.53, 5.9)]
    assert [bool(row["fault"]) for row in found] == [False, False, True]
    assert steps.agreed({"name": "x", "absent": "no memory"}, losses) == {"name": "x", "absent": "no memory"}


@pytest.mark.full
def test_what_does_not_fit_is_a_line_and_peers_try_half(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def too_large(shape: speed.Shape, micro: int, *_: Any, **how: Any) -> Any:
        tried.append(micro)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(steps, "SYSTEMS", {"large": too_large})
    rows = [row for row in steps._others(steps.GPT.of(CPU), CPU, 8) if "published" not in row["name"]]
    assert tried == [8, 4] and all(row["absent"] == "does not fit into the memory" for row in rows)

    def broken() -> Any:
        raise RuntimeError("no")

    assert speed.measured("x", broken, CPU, steps.GPT)["fault"] == "RuntimeError: no"
    assert speed.measured("x", broken, CPU, steps.GPT, ours=False)["absent"] == "RuntimeError: no"


def test_the_times_of_a_profile() -> None:
    """Two streams overlap; 10 of 50 us are idle."""
    spans = [("a", 0.0, 20.0), ("b", 10.0, 30.0), ("a", 40.0, 50.0)]
    whole, first, second = steps.times_of(spans)
    assert whole["ms"] == 0.05 and whole["idle"] == pytest.approx(0.2)
    assert (first["name"], first["ms"], first["launches"]) == ("  a", 0.03, 2) and second["share"] == pytest.approx(0.4)


def test_wrong_attention_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "take", lambda name: None)  # all of this process would take it
    monkeypatch.setattr(
        attention, "systems", lambda *_: {"not causal": lambda q, k, v: attention._plain(q, k, v) * 1.05}
    )
    monkeypatch.setattr(attention, "MODELS", {"x": (steps.LLAMA, 2)})
    assert ["error" in str(row["fault"]) for row in attention.rows(CPU)] == [True]


OURS = """========= COMPUTE-SANITIZER
called rotary, torch.float32
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::elementwise<4>(int)+0x20
=========
========= Invalid __global__ write of size 16 bytes
=========     at void megazero::dropout_backward<float, 4>(int)+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""


def test_what_compute_sanitizer_says() -> None:
    """An error in a kernel of others is counted; one in ours is a fault, and so is a tool that says nothing."""
    gpu = Asked(torch.device("cuda", 0), tiny=True)
    row = correctness.verdict("memcheck", OURS, "", gpu)
    assert (row["of_ours"], row["of_others"], row["summary"]) == (1, 1, "2 errors")
    assert "dropout_backward" in row["fault"]
    theirs = correctness.verdict("memcheck", OURS.replace("megazero", "cub"), "", gpu)
    assert theirs["fault"] is None and theirs["of_others"] == 2
    assert correctness.verdict("memcheck", "it broke", "it broke", gpu)["fault"] == "it broke"
    assert correctness.verdict("memcheck", "called x", "", CPU)["fault"] is None


def test_runs_are_compared_bit_for_bit(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1 / step, "grad_norm": 2.0} for step in (1, 2, 3)]
    other = [*rows[:2], rows[2] | {"loss": math.nextafter(1 / 3, 1)}]
    assert train.same_bits("x", rows, rows, "")["fault"] is None
    assert train.same_bits("x", other, rows, "")["fault"] == "not equal bit for bit; the first other step: 3"
    assert "other numbers of rows" in train.same_bits("x", rows[:2], rows, "")["fault"]
    assert train.same_bits("x", [], [], "")["fault"] and train.same_bits("x", rows, rows, "MZ-1")["fault"] == "MZ-1"
    files = [tmp_path / name / "checkpoints" / "step_00000010" / "0.safetensors" for name in "ab"]
    assert train.same_files(tmp_path / "a", tmp_path / "b")["fault"], "nothing was saved"
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"12")
    assert train.same_files(tmp_path / "a", tmp_path / "b")["fault"] is None
    files[1].write_bytes(b"13")
    assert train.same_files(tmp_path / "a", tmp_path / "b")["fault"] == "the saved tensors differ"
    assert train.whole(tmp_path / "a", "")["fault"] == "0 rows instead of 10"


def test_a_process_notes_its_first_steps() -> None:
    found = rates.first_steps(CPU.device)
    assert found["start_s"] < found["step_1_s"] < found["step_2_s"] < found["step_3_s"]


def wheel(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "there = True")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")


def test_carried_wheels_are_installed_where_one_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine's Python is left as it is; one of another version is told so."""
    wheel(tmp_path / "wheels", "numpy")
    assert carry.install(tmp_path) == "" and not (tmp_path / "installed").exists(), "nothing is missing"
    wheel(tmp_path / "wheels", "carried_by_a_test")
    monkeypatch.setattr(carry, "RUNS", "Python 2.7 on Plan9 vax")
    assert carry.install(tmp_path) == "" and "the carried wheels are of Python 2.7" in capsys.readouterr().err
    here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.system()} {platform.machine()}"
    monkeypatch.setattr(carry, "RUNS", here)
    path = carry.install(tmp_path)
    words = [sys.executable, "-c", "import carried_by_a_test; print(carried_by_a_test.there)"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert carry.install(tmp_path / "nothing carried") == ""


def test_what_is_carried_is_in_the_lock_file() -> None:
    names = {line.partition("==")[0] for line in carry.LOCK.read_text().splitlines()}
    assert set(carry.LOCKED) <= names


@pytest.mark.full
def test_steps_take_the_run_s_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are watched, and those that are timed."""
    models = []
    for module in (waits, speed):
        monkeypatch.setattr(module, "settle_attention", lambda config, model, device, first: models.append(model))
    monkeypatch.setattr(waits, "CASES", waits.CASES[:1])
    assert [row.get("fault") for row in waits.rows(CPU)] == [None, None] and len(models) == 1
    ops = layouts.choose("reference", CPU.device, torch.bfloat16)
    speed.stepper(ranks.PLAIN, single(), CPU, ops, speed.GPT_1_3B.of(CPU))(0)
    assert len(models) == 2


def test_what_is_compared_with_a_cpu_takes_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what would be told to a GPU."""
    told = []
    monkeypatch.setattr(layouts, "take", told.append)
    for owner, name in ((layouts, "fix_cublas_workspace"), (torch, "use_deterministic_algorithms")):
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())
    layouts.exact(torch.device("cuda", 0))
    assert told == [1, "math"]


def test_waits_are_errors_but_in_the_named_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what would be told to a GPU."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    host = Host(CPU.device, single().comm.ledger)
    with waits.watched(Asked(torch.device("cuda", 0), tiny=True)):
        assert modes == ["error"]
        host.settle()
        assert modes == ["error", "default", "error"]
    assert modes[3:] == ["default"]
    with waits.watched(CPU):
        assert len(modes) == 4


def test_a_wait_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:

    def wait(*_: Any, **__: Any) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(Engine, "finish_step", wait)
    monkeypatch.setattr(waits, "CASES", waits.CASES[:1])
    _, row = waits.rows(CPU)
    assert row["fault"].startswith("RuntimeError: called a synchronizing CUDA operation in trainer.py:")
    assert row["fault"].endswith(" train_step")


def test_a_wrong_weight_is_a_failure_and_so_is_a_wrong_bit() -> None:
    layout = replace(ranks.PLAIN, how={"micro_batch": 4})
    alone = layouts.train(layout, single(), torch.device("cpu"))
    for apart, exact, fault in ((0.0, True, None), (1e-7, False, None), (1e-7, True, "bit"), (0.1, False, "weight")):
        name = "weight/2/blocks.0.mlp.up.weight"
        other = replace(alone, stored=alone.stored | {name: alone.stored[name] * (1 + apart)})
        row = ranks.row_of(layout, [other], alone, exact=exact)
        assert row["fault"] is None if fault is None else fault in str(row["fault"])
        assert ("FAILED" in line(row)) is (fault is not None)
