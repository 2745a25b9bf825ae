"""The check of a machine's GPU, tried on the CPU: all it does but the kernels themselves."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from megazero.kernels import reference
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import bandwidth, training
from scripts.gpu_check.samples import SAMPLES, Draw, distance, least_bytes, results

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
    assert {row["name"] for row in report["correctness"]} == set(SAMPLES)
    assert {row["name"] for row in report["bandwidth"]["rows"]} == set(SAMPLES)
    assert all(row["fused_us"] > 0 and row["eager_us"] > 0 for row in report["bandwidth"]["rows"])
    assert "0 failures" in capsys.readouterr().out


@needs_gcc
def test_a_wrong_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.correctness, "results", lambda *arguments: (results(*arguments)[0] * 1.01,))
    monkeypatch.setattr(gpu_check.correctness, "SAMPLES", {"swiglu": SAMPLES["swiglu"]})
    gpu_check.cpu.load()
    assert gpu_check.checked(torch.device("cpu"), tiny=True)[1] == 3


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
    statistic a row; a square causal matrix a half read and a whole written.
    """
    generator, sizes = torch.Generator().manual_seed(0), bandwidth.TINY
    found = {}
    for name in ("adamw_", "rms_norm", "causal_softmax"):
        arguments = SAMPLES[name](Draw(torch.bfloat16, generator), sizes)
        found[name] = least_bytes(name, arguments, results(reference, name, arguments))
    rows, scores = sizes.sequence * sizes.batch, sizes.batch * sizes.heads * sizes.queries * sizes.keys
    assert found["adamw_"] == 30 * sizes.flat + 4 * 4
    assert found["rms_norm"] == 4 * rows * sizes.hidden + 2 * sizes.hidden + 4 * rows
    assert found["causal_softmax"] == 2 * scores * (sizes.keys + 1) // (2 * sizes.keys) + 2 * scores


def test_the_large_model_has_1_3_billion_parameters() -> None:
    """And costs what the formula of PaLM says, worked out by hand."""
    assert 1.3e9 < training.parameters(training.LARGE) < 1.35e9
    by_hand = 6 * (12 * 24 * 2048**2 + 52_352 * 2048) + 12 * 24 * 2048 * 2048
    assert training.flops_per_token(training.LARGE) == by_hand
