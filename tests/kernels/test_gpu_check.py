"""The check of a machine's GPU, tried on the CPU: all it does but what a GPU alone does."""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.build.pipeline import model_shape
from megazero.comm.grid import single
from megazero.comm.host import Host
from megazero.config.schema import Config, resolved
from megazero.kernels import cpu, reference
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import bandwidth, correctness, machine, parts, ranks, speed, timing, training, waits
from scripts.gpu_check.findings import Asked, Row, line, markdown
from scripts.gpu_check.layouts import config_of, settings, train
from scripts.gpu_check.parts import PARTS, Part
from scripts.gpu_check.samples import FORMS, SAMPLES, Draw, distance, least_bytes, results

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


@needs_gcc
def test_a_dry_run_of_what_needs_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "ROUND_S", 1e-4)
    monkeypatch.setattr(speed, "WARM_UP", 1)
    monkeypatch.setattr(speed, "STEPS", 1)
    monkeypatch.setattr(waits, "UNWATCHED", 1)
    monkeypatch.setattr(waits, "WATCHED", 1)
    chosen = [name for name in PARTS if name not in ("nccl", "engine", "ranks")]
    code, report = checked(target := tmp_path / "report.json", "--only", *chosen)
    assert faults(report) == [] and code == report["failures"] == 0
    assert list(report["parts"]) == chosen and all(part["rows"] for part in report["parts"].values())
    rows = {name: part["rows"] for name, part in report["parts"].items()}
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["commit"]
    assert {row["name"] for row in rows["correctness"]} == {"seed", *SAMPLES, *FORMS}
    assert {row["name"] for row in rows["bandwidth"] if "us" in row} == set(SAMPLES)
    assert [row["name"] for row in rows["training"]] == [
        f"{kernels}, micro-batch {micro}" for kernels in ("fused", "reference") for micro in (1, 4)
    ]
    assert all(math.isfinite(row["loss"]) and row["step_s"] > 0 and row["mfu"] is None for row in rows["training"])
    alone, *stages = rows["exchange"]
    assert alone["sent_gb"] == 0 and all(row["sent_gb"] > 0 and row["times_stage_0"] > 0 for row in stages)
    assert all(row["operations"] == row["found_ended"] > 0 for row in stages)
    assert [row["name"] for row in rows["waits"][1:]] == [case.name for case in waits.CASES]
    assert len(rows["host"]) == 6 and all(row["both_us"] > 0 for row in rows["host"])
    assert {"blocks, ours, fused", "blocks, plain", "loss, 64, ours, fused", "loss, 64, plain"} <= {
        row["name"] for row in rows["blocks"] if "us" in row
    }
    tables = target.with_suffix(".md").read_text()
    assert all(f"## {PARTS[name].title}" in tables for name in chosen) and report["machine"]["commit"] in tables


def named(patch: pytest.MonkeyPatch, **rows: Any) -> None:
    """Make parts of functions that yield rows."""
    patch.setattr(parts, "PARTS", {name: Part(name, 20.0, name) for name in rows})
    patch.setattr(gpu_check, "PARTS", parts.PARTS)
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
    monkeypatch.setitem(parts.PARTS, "hung", Part("hung", 1.0, "hung"))
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
    assert "not here: no such thing" in out and "FAILED not done within 1 s" in out and "3 failures" in out


def test_a_check_without_time_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, machine=say, hung=hung, last=say)
    monkeypatch.setattr(gpu_check, "LEAST", 0.5)
    begin = time.monotonic()
    code, report = checked(tmp_path / "report.json", "--seconds", "1.2")
    assert time.monotonic() - begin < 10
    assert code == 0 and faults(report) == []
    assert [part["rows"][-1].get("absent", "") for part in report["parts"].values()] == [
        "",
        "the rest: the check's time was over after 1 s",
        "all of it: the check's time was over",
    ]


def test_all_limits_are_within_the_time() -> None:
    assert gpu_check.SECONDS < 8 * 60
    first = list(PARTS)[: list(PARTS).index("training") + 1]
    assert sum(PARTS[name].limit for name in first) < gpu_check.SECONDS, "what comes first has all of its time"


def test_without_a_gpu_or_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each; what is missing is no failure, a device that is asked for is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (row,) = machine.rows(Asked(torch.device("cuda", 0), tiny=True))
    assert "torch sees no GPU; --device cpu" in row["fault"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # in the other one a library may lie ready
    code, report = checked(tmp_path / "report.json", "--only", "build", "correctness")
    assert code == 0 and report["machine"]["commit"] == "-"
    assert [row["absent"] for row in report["parts"]["build"]["rows"]] == ["no g++ on this machine"]
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
    assert (
        "|  | us | size |  |" in text and "| a / b | 1235 | - |  |" in text and "| c | - | 2x3 | FAILED wrong |" in text
    )


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
        found[name] = least_bytes(name, arguments, results(reference, name, arguments))
    rows = sizes.sequence * sizes.batch
    assert found["adamw_"] == 30 * sizes.flat + 4 * 4
    assert found["rms_norm"] == 4 * rows * sizes.hidden + 2 * sizes.hidden + 4 * rows


def test_the_large_model_has_1_3_billion_parameters() -> None:
    """And costs what the planner says (PaLM's formula), worked out by hand: positions are no product."""
    shape = model_shape(config_of(ranks.PLAIN, speed.LARGE))
    assert 1.3e9 < shape.parameters() < 1.35e9
    assert shape.flops_per_token() == 6 * (12 * 24 * 2048**2 + 50_304 * 2048) + 12 * 24 * 2048 * 2048


@pytest.mark.parametrize(("loss", "fails"), [(5.5, False), (5.9, True)])
def test_training_to_another_loss_is_a_failure(loss: float, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter((5.52, loss))
    monkeypatch.setattr(training, "missing", lambda device: {"name": "kernels", "absent": "no nvcc"})
    monkeypatch.setattr(training, "measured", lambda name, *_: {"name": name, "loss": next(losses)})
    absent, *rows = training.rows(CPU)
    assert absent["absent"] == "no nvcc" and [row["name"] for row in rows] == [
        "reference, micro-batch 1",
        "reference, micro-batch 4",
    ]
    assert [bool(row.get("fault")) for row in rows] == [False, fails]


def test_a_model_that_does_not_fit_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fits(name: str, case: Any, *_: Any) -> Row:
        tried.append(case.job.recompute)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return {"name": name}

    monkeypatch.setattr(speed, "_measured", fits)
    row = speed.measured("x", ranks.PLAIN, single(), CPU, None)  # type: ignore[arg-type]
    assert row == {"name": "x, recomputed"} and tried == ["none", "full"]


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
    honest = waits.trainer

    def waiting(*arguments: Any) -> Any:
        trainer = honest(*arguments)

        def wait(*_: Any) -> None:
            raise RuntimeError("called a synchronizing CUDA operation")

        trainer.engine.finish_step = wait  # type: ignore[method-assign]
        return trainer

    monkeypatch.setattr(waits, "trainer", waiting)
    monkeypatch.setattr(waits, "CASES", waits.CASES[:1])
    _, row = waits.rows(CPU)
    assert row["fault"].startswith("RuntimeError: called a synchronizing CUDA operation in trainer.py:")
    assert row["fault"].endswith(" train_step")


@pytest.mark.parametrize(
    "layout", [*ranks.TWO, *ranks.FOUR, *ranks.ALONE, *waits.CASES], ids=lambda layout: layout.name
)
def test_its_settings_are_those_of_a_checked_config(layout: ranks.Case) -> None:
    values = settings(layout)
    batch = {"global": values["batch"]["global_"], "micro": values["batch"]["micro"]}
    config = resolved(Config.model_validate(values | {"batch": batch}))
    for section, options in values.items():
        for name, value in options.items():
            found = getattr(getattr(config, section), name)
            if isinstance(value, dict):  # a section within a section
                found, value = found.model_dump(), found.model_dump() | value
            assert found == value, f"{section}.{name}"


def test_a_wrong_weight_is_a_failure_and_so_is_a_wrong_bit() -> None:
    layout = replace(ranks.PLAIN, how={"micro_batch": 4})
    alone = train(layout, single(), torch.device("cpu"))
    for apart, exact, fault in ((0.0, True, None), (1e-7, False, None), (1e-7, True, "bit"), (0.1, False, "weight")):
        name = "weight/2/blocks.0.mlp.up.weight"
        other = replace(alone, stored=alone.stored | {name: alone.stored[name] * (1 + apart)})
        row = ranks.row_of(layout, [other], alone, exact=exact)
        assert row["fault"] is None if fault is None else fault in str(row["fault"])
        assert ("FAILED" in line(row)) is (fault is not None)
