"""`megazero doctor --kernels`: every family that a config uses is timed at the sizes of one of its ranks."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.__main__ import main
from megazero.config.file import load
from megazero.kernels.samples import Sizes
from megazero.tools.doctor import kernels
from megazero.tools.planning.micro_batch import sized

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of torch.compile
]
SMALL = ("model.layers=2", "model.hidden=64", "model.heads=4", "model.vocab=100", "model.seq_len=32", "batch.micro=2")
LLAMA = ("model.norm=rmsnorm", "model.activation=swiglu", "model.position=rotary")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main(["doctor", "--kernels", "--config", "quickstart", *SMALL, *words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    return {finding["name"]: finding for finding in found}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first implementation of an operation takes 2 ms, the second 1 ms, the third fails."""

    def medians(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float | str]:
        return [[2e-3, 1e-3, "RuntimeError: no"][min(place, 2)] for place in range(len(calls))]

    monkeypatch.setattr(kernels, "medians", medians)


def test_a_line_has_the_times_and_the_choice(timed: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *LLAMA)
    assert list(found) == ["apex", "norm", "norm of a sum", "swiglu", "rotary", "cross entropy", "flat"]
    said = "compile 2 ms, fused 4 ms; auto takes fused, compile is 2.00 times as fast"  # forward and backward
    assert found["swiglu"]["text"] == said and found["swiglu"]["values"] == {"fused": 4e-3, "compile": 2e-3}
    assert found["cross entropy"]["text"].startswith("reference 2 ms, fused 4 ms; ")  # is not compiled


def test_families_that_a_config_uses(timed: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model.dropout=0.1", "precision.dtype=bf16", "zero.quantize.gradients=int8", "zero.stage=2")
    found = answer(capsys, "model.activation=gelu", "model.norm=layernorm", "model.position=learned", *words)
    families = ["norm", "norm of a sum", "gelu", "dropout", "cross entropy", "flat", "quantized", "adamw"]
    assert list(found) == ["apex", *families]
    assert found["adamw"]["text"] == "fused 2 ms; auto takes fused"


def test_sizes_are_those_of_a_rank() -> None:
    config = load("quickstart", [*SMALL, *LLAMA, "model.ffn=96", "model.kv_heads=4", "parallel.tensor=2"])
    sizes = kernels.sizes_of(sized(config, 2))
    block = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert sizes == Sizes(32, 2, 64, 48, 50, 2, 16, block // 2)


@pytest.mark.full
def test_every_implementation_of_this_machine_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *LLAMA)
    assert found["norm"]["values"].keys() == {"fused", "compile", "reference"}
    assert all(seconds > 0 for each in found.values() for seconds in each["values"].values())


def test_bad_requests_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (["--kernels"], ["--config", "quickstart"]):
        assert main(["doctor", *words]) != 0
        assert capsys.readouterr().err == (
            "MZ-100 doctor: --kernels and --config need each other; give both or neither\n"
        )
