"""The parts of the GPU's check that start ranks, tried on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.comm.grid import single
from megazero.tools.certify.rank import write_results
from scripts.gpu_check import commands, layouts, ranks
from scripts.gpu_check.findings import Asked
from tests.kernels.test_gpu_check import needs_gcc

CPU = Asked(torch.device("cpu"), tiny=True)


@pytest.mark.full
@needs_gcc
def test_ranks_and_fused_kernels_compute_what_one_process_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "SHARED", (ranks.TWO[3:4],))
    monkeypatch.setattr(ranks, "FUSED", ranks.FUSED[2:])
    monkeypatch.setattr(ranks, "DTYPES", ("fp32",))
    allowed, row = ranks.on_shared_gpu(CPU)
    assert row["fault"] is None and 0 < row["weights"] <= allowed["weights"], "another layout, to the last bit?"
    assert "2 ranks on cpu: each sent " in capfd.readouterr().out, "tensors go through the host's memory"
    monkeypatch.setattr(ranks, "_trained", lambda *_, **__: iter(()))  # two ranks: in the dry run of all of it
    (row,) = ranks.fused(CPU)
    assert row["fault"] is None and 0 < row["gradients"] <= allowed["gradients"]


@needs_gcc
def test_a_wrong_fused_kernel_shows_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """By so little that no loss shows it in 16 bits."""
    honest = layouts.choose

    def off(preference: str, device: torch.device, dtype: torch.dtype) -> Any:
        ops = honest(preference, device, dtype)
        wrong = lambda *arguments: ops.bias_gelu(*arguments) * (1 + 2e-5)  # noqa: E731
        return replace(ops, bias_gelu=wrong) if preference == "fused" else ops

    monkeypatch.setattr(layouts, "choose", off)
    monkeypatch.setattr(ranks, "FUSED", ranks.FUSED[:1])
    monkeypatch.setattr(ranks, "_trained", lambda *_, **__: iter(()))  # two ranks: in the dry run of all of it
    (row,) = ranks.fused(CPU)
    assert row["fault"] and "step 1" in row["fault"]


def test_a_rank_that_fails_at_its_end_is_a_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All results are there, but leaving broke."""
    monkeypatch.setattr(ranks, "DTYPES", ("fp32",))
    cases, alone = ranks.ALONE[:2], layouts.train(ranks.PLAIN, single(), CPU.device)

    def leave(folder: Path, *_: object, **__: object) -> str:
        for layout in cases:
            (folder / layout.folder).mkdir()
            write_results(alone, folder / layout.folder, 0)
        return "rank 0 ended with 1"

    monkeypatch.setattr(ranks, "_run", leave)
    first, last = [found for _, found in ranks._trained(CPU, cases, shares_gpus=True)]
    assert not isinstance(first, str) and last == "rank 0 ended with 1"
    assert ranks.row_of(cases[0], first, alone, exact=True)["fault"] is None, "read from a file: equal"


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo here; exec sleep 60"]
    assert commands.run(words, tmp_path / "log", 0.5, CPU.device) == "not done within 0.5 s: here"


def test_a_rank_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is asked for a GPU that is not there."""
    monkeypatch.setattr(ranks, "DTYPES", ("fp32",))
    if torch.cuda.is_available():
        pytest.skip("there is one")
    _, *rows = ranks._beside_cpu([ranks.TWO[:1]], Asked(torch.device("cuda", 0), tiny=True), shares_gpus=True)
    assert len(rows) == 1 and "asked for cuda, torch has cpu" in rows[0]["fault"]


def test_nccl_needs_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (row,) = ranks.on_own_gpus(Asked(torch.device("cuda", 0), tiny=True))
    assert "it needs a GPU for each rank" in row["absent"]
