"""The check of a machine's GPU, tried on the CPU: all it does but the kernels themselves."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.comm.grid import single
from megazero.config.schema import Config, resolved
from megazero.kernels import reference
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import bandwidth, ranks, training
from scripts.gpu_check.layouts import settings, train
from scripts.gpu_check.samples import FORMS, SAMPLES, Draw, distance, least_bytes, results

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@needs_gcc
def test_a_run_with_small_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bandwidth, "ROUNDS", 1)
    monkeypatch.setattr(bandwidth, "ROUND_S", 1e-4)
    target = tmp_path / "report.json"
    words = ["gpu_check", "--device", "cpu", "--tiny", "--only", "correctness", "bandwidth", "--json", str(target)]
    monkeypatch.setattr("sys.argv", words)
    assert gpu_check.main() == 0
    report = json.loads(target.read_text())
    assert {row["name"] for row in report["correctness"]} == set(SAMPLES | FORMS)
    assert {row["name"] for row in report["bandwidth"]["rows"]} == set(SAMPLES)
    assert all(row["fused_us"] > 0 and row["eager_us"] > 0 for row in report["bandwidth"]["rows"])
    assert "0 failures" in capsys.readouterr().out


@needs_gcc
def test_a_wrong_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.correctness, "results", lambda *arguments: (results(*arguments)[0] * 1.01,))
    monkeypatch.setattr(gpu_check.correctness, "SAMPLES", {"swiglu": SAMPLES["swiglu"]})
    monkeypatch.setattr(gpu_check.correctness, "FORMS", {})
    gpu_check.cpu.load()
    assert gpu_check.checked(torch.device("cpu"), tiny=True)[1] == 3


@needs_gcc
def test_what_breaks_is_a_failure_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation in a part, a part among the parts: what else was found is in the file."""

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(gpu_check.correctness, "SAMPLES", {"swiglu": broken, "cast_": SAMPLES["cast_"]})
    monkeypatch.setattr(bandwidth, "SAMPLES", {"swiglu": broken})
    monkeypatch.setattr(gpu_check, "trained", broken)
    target = tmp_path / "report.json"
    words = ["--device", "cpu", "--tiny", "--only", "training", "correctness", "bandwidth", "--json", str(target)]
    monkeypatch.setattr("sys.argv", ["gpu_check", *words])
    assert gpu_check.main() == 1
    report = json.loads(target.read_text())
    assert {row["name"] for row in report["correctness"] if row["error"] is not None} == {"cast_"} | set(FORMS)
    assert report["failures"] == 3 + 1 + 1
    assert report["bandwidth"]["rows"] == []
    assert report["training"] == {"error": "RuntimeError()"}


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
    """And costs what the formula of PaLM says, worked out by hand."""
    assert 1.3e9 < training.parameters(training.LARGE) < 1.35e9
    by_hand = 6 * (12 * 24 * 2048**2 + 52_352 * 2048) + 12 * 24 * 2048 * 2048
    assert training.flops_per_token(training.LARGE) == by_hand


LACKING = ("pydantic", "ruamel", "wandb")
FEWER = """
import sys
from scripts.gpu_check import __main__ as check, ranks, training
training.WARM_UP, training.STEPS = 1, 1
ranks.SHARED, ranks.ALONE, ranks.DTYPES = (ranks.TWO[3::3],), (ranks.PLAIN, *ranks.ALONE[-1:]), ("fp32",)
sys.exit(check.main())
"""


@needs_gcc
def test_training_in_ranks_and_alone_without_the_packages_of_configs(tmp_path: Path) -> None:
    """Which a machine with a GPU may lack: here, and in every process that the check starts."""
    for name in LACKING:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not here')\n")
    target, path = tmp_path / "report.json", f"{tmp_path}{os.pathsep}{ranks.ROOT}"
    line = [
        sys.executable,
        "-c",
        FEWER,
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "training",
        "ranks",
        "engine",
        "--json",
        str(target),
    ]
    done = subprocess.run(line, cwd=ranks.ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on cpu: each sent " in done.stdout, "tensors go through the host's memory"
    report = json.loads(target.read_text())
    assert [row["layout"] for row in report["ranks"]] == ["stage 3, data 2, offload", "pipeline 2"]
    assert [row["layout"] for row in report["engine"]] == ["the same, optimizer on the host"]
    assert [row["kernels"] for row in report["training"]] == ["fused", "reference"]
    assert all(math.isfinite(row["loss"]) and row["step_s"] > 0 and row["mfu"] is None for row in report["training"])
    for row in (*report["ranks"], *report["engine"]):
        assert row["fault"] is None
        assert 0 <= row["found"]["weights"] <= row["allowed"]["weights"]
    assert all(row["found"]["weights"] > 0 for row in report["ranks"]), "another layout, to the last bit?"
    refused = subprocess.run([sys.executable, "-c", "import pydantic"], env=os.environ | {"PYTHONPATH": path})
    assert refused.returncode != 0, "pydantic was there all the time"


@needs_gcc
@pytest.mark.parametrize(("loss", "fails"), [(5.5, 0), (5.9, 1), (math.nan, 1)])
def test_training_to_another_loss_is_a_failure(loss: float, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [training.Trained(name, 1.0, 1.0, None, each, 1.0) for name, each in (("fused", loss), ("reference", 5.52))]
    monkeypatch.setattr(training, "train", lambda *_: rows)
    assert gpu_check.trained(torch.device("cpu"), True, 1)[1] == fails


def test_without_a_gpu_or_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; and one failure, not one for each operation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert "torch sees no GPU; --device cpu" in capsys.readouterr().err
    target = tmp_path / "report.json"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # in the other one a library may lie ready
    monkeypatch.setattr("sys.argv", ["gpu_check", "--device", "cpu", "--tiny", "--json", str(target)])
    assert gpu_check.main() == 1
    assert json.loads(target.read_text())["failures"] == 1


@pytest.mark.parametrize("layout", [*ranks.TWO, *ranks.FOUR, *ranks.ALONE], ids=lambda layout: layout.name)
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
        row = ranks._row("engine", layout, [other], alone, exact=exact)
        assert row.fault is None if fault is None else fault in str(row.fault)
        assert ("FAILED" in ranks.table([row])) is (fault is not None)


def test_a_rank_that_fails_at_its_end_is_a_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All results are there, but leaving broke; and a rank that a signal ended says so itself."""
    monkeypatch.setattr(ranks, "DTYPES", ("fp32",))
    run = ranks._run
    monkeypatch.setattr(ranks, "_run", lambda *job: run(*job) or "rank 0 ended with 1")
    found = [ranks_ for _, ranks_ in ranks._trained(torch.device("cpu"), ranks.ALONE[:2])]
    assert not isinstance(found[0], str) and found[1] == "rank 0 ended with 1"
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "rank $4 here"\n[ "$4" = 0 ] && exec sleep 60\nkill -9 $$\n')
    script.chmod(0o755)
    monkeypatch.setattr(ranks.sys, "executable", str(script))
    assert run(tmp_path, 2, torch.device("cpu")) == "rank 1 ended with -9: rank 1 here"
    monkeypatch.setattr(ranks, "LIMIT_S", 0.2)
    assert run(tmp_path, 1, torch.device("cpu")) == "not done within 0.2 s: rank 0 here"


def test_a_rank_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is asked for a GPU that is not there."""
    monkeypatch.setattr(ranks, "DTYPES", ("fp32",))
    if torch.cuda.is_available():
        pytest.skip("there is one")
    rows = list(ranks.engine(torch.device("cuda")))
    assert len(rows) == len(ranks.ALONE) and all("asked for cuda, torch has cpu" in str(row.fault) for row in rows)
