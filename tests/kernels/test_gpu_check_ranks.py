"""The parts of the GPU's check that start ranks, tried on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megazero.comm.grid import single
from megazero.tools.certify.rank import write_results
from scripts.gpu_check import rank, ranks
from scripts.gpu_check.findings import Asked
from scripts.gpu_check.layouts import train
from tests.kernels.test_gpu_check import needs_gcc

CPU = Asked(torch.device("cpu"), tiny=True)
LACKING = ("pydantic", "ruamel", "wandb", "liger_kernel")
FEWER = """
import sys
from scripts.gpu_check import __main__ as check, ranks
assert all(callable(part.rows()) for part in check.PARTS.values()), "all that it needs is here"
ranks.SHARED, ranks.ALONE, ranks.DTYPES = (ranks.TWO[3:4],), ranks.ALONE[-1:], ("fp32",)
sys.exit(check.main())
"""


@needs_gcc
def test_parts_that_train_without_the_packages_of_configs(tmp_path: Path) -> None:
    """Which a machine with a GPU may lack: here, and in every process that the check starts."""
    for name in LACKING:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not here')\n")
    target, path = tmp_path / "report.json", f"{tmp_path}{os.pathsep}{ranks.ROOT}"
    only = ["nccl", "ranks", "engine"]
    line = [sys.executable, "-c", FEWER, "--device", "cpu", "--tiny", "--only", *only, "--json", str(target)]
    done = subprocess.run(line, cwd=ranks.ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on cpu: each sent " in done.stdout, "tensors go through the host's memory"
    report = {name: part["rows"] for name, part in json.loads(target.read_text())["parts"].items()}
    layouts = {"ranks": ranks.TWO[3].name, "nccl": ranks.TWO[3].name, "engine": ranks.ALONE[-1].name}
    for part, layout in layouts.items():
        allowed, *rows = report[part]
        assert [row["name"] for row in rows] == [layout], part
        assert all(row["fault"] is None and 0 <= row["weights"] <= allowed["weights"] for row in rows)
        assert part == "engine" or all(row["weights"] > 0 for row in rows), "another layout, to the last bit?"
    refused = subprocess.run([sys.executable, "-c", "import pydantic"], env=os.environ | {"PYTHONPATH": path})
    assert refused.returncode != 0, "pydantic was there all the time"


def test_a_rank_that_fails_at_its_end_is_a_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All results are there, but leaving broke."""
    monkeypatch.setattr(ranks, "DTYPES", ("fp32",))
    layouts, alone = ranks.ALONE[:2], train(ranks.PLAIN, single(), CPU.device)

    def leave(folder: Path, device: torch.device) -> str:
        for layout in layouts:
            (folder / layout.folder).mkdir()
            write_results(alone, folder / layout.folder, 0)
        return "rank 0 ended with 1"

    monkeypatch.setattr(ranks, "_run", leave)
    first, last = [found for _, found in ranks._trained(CPU, layouts, shares_gpus=True)]
    assert not isinstance(first, str) and last == "rank 0 ended with 1"


def sleep_or_die(rank: int) -> None:
    os.write(1, f"rank {rank} here\n".encode())
    if rank == 0:
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_a_signal_ends_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert rank.run(2, sleep_or_die, tmp_path) == 1 and time.monotonic() - begin < 30
    assert capfd.readouterr().out.splitlines()[-1] == "rank 1 ended with -9: rank 1 here"


def test_ranks_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "ranks here"\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setattr(ranks.sys, "executable", str(script))
    monkeypatch.setattr(ranks, "LIMIT_S", 0.5)
    assert ranks._run(tmp_path, CPU.device) == "not done within 0.5 s: ranks here"


def test_a_rank_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is asked for a GPU that is not there."""
    monkeypatch.setattr(ranks, "DTYPES", ("fp32",))
    if torch.cuda.is_available():
        pytest.skip("there is one")
    _, *rows = ranks._beside_cpu([ranks.TWO[:1]], Asked(torch.device("cuda", 0), tiny=True), shares_gpus=True)
    assert len(rows) == 1 and "asked for cuda, torch has cpu" in rows[0]["fault"]


def test_several_gpus_are_measured_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here two ranks of the CPU; and with one GPU NCCL has nobody to talk to."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (row,) = ranks.on_own_gpus(Asked(torch.device("cuda", 0), tiny=True))
    assert "NCCL refuses two ranks" in row["absent"]
    (row,) = ranks.speeds(2, CPU, [3])
    assert row["name"] == "stage 3, 2 ranks" and row["sent_gb"] > 0 and row["step_s"] > 0
