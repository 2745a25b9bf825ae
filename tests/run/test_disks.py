"""Runs whose state is on disks: the same numbers and checkpoints, nothing left behind, one line where it cannot be."""

import os
from pathlib import Path

import pytest
import torch

from megazero.base.errors import UserError
from megazero.comm.ledger import Ledger
from megazero.observe.jsonl import read_rows
from megazero.run.disks import open_disks
from megazero.run.folder import RunFolder
from tests.run.test_session import training
from tests.tiny_run import TinyData, command, repeating, saved_bytes

NVME = ("zero.stage=3", "zero.offload.optimizer=nvme", "zero.offload.parameters=nvme")
STEPS = ("run.steps=6", "checkpoint.every=3", "checkpoint.keep=2")


def run(tiny_data: TinyData, folder: Path, *options: str) -> RunFolder:
    done = command("train.py", "--config", tiny_data.config, f"run.dir={folder}", *STEPS, *options)
    assert done.returncode == 0, done.stderr
    return RunFolder(folder)


def numbers(folder: RunFolder) -> list[dict]:
    """What must be the same wherever state rests."""
    rows = map(repeating, read_rows(folder.metrics))
    return [{key: value for key, value in row.items() if key != "memory_peak_bytes"} for row in rows]


def test_a_run_on_disks_is_the_run_in_memory(tiny_data: TinyData, tmp_path: Path) -> None:
    """Rows and checkpoints, bit for bit; a run in memory goes on from it, and the other way round."""
    disk = (*NVME, f"zero.offload.path=[{tmp_path / 'a'},{tmp_path / 'b'}]")
    there = run(tiny_data, tmp_path / "there", *disk)
    here = run(tiny_data, tmp_path / "here", "zero.stage=3")
    assert numbers(there) == numbers(here)
    assert saved_bytes(there) == saved_bytes(here)
    longer = ("run.steps=9", "schedule.decay=constant")
    constant = run(tiny_data, tmp_path / "constant", *disk, "schedule.decay=constant")
    run(tiny_data, constant.path, "zero.stage=3", *longer, "checkpoint.resume=auto")
    other = run(tiny_data, tmp_path / "other", "zero.stage=3", "schedule.decay=constant")
    run(tiny_data, other.path, *disk, *longer, "checkpoint.resume=auto")
    assert numbers(constant) == numbers(other) and saved_bytes(constant) == saved_bytes(other)
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]


def test_the_log_says_how_disks_are_used(tiny_data: TinyData, tmp_path: Path) -> None:
    folder = run(
        tiny_data, tmp_path / "run", *NVME, f"zero.offload.path={tmp_path / 'disk'}", "zero.offload.host_mb=200"
    )
    (line,) = [line for line in folder.log(0).read_text().splitlines() if "nvme: " in line]
    assert f"nvme: {tmp_path / 'disk'} by " in line and "200 MiB of memory" in line


def test_nothing_is_left_behind_by_a_run_that_is_killed(tiny_data: TinyData, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with training(tiny_data, tmp_path / "run", "run.steps=1000", *NVME, f"zero.offload.path={disk}") as process:
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        assert list(disk.iterdir()) == [], "the files have no names"
    assert list(disk.iterdir()) == []


FAULTS = {
    "MZ-601": "zero.offload.path={tmp}/file/below",
    "MZ-605": "zero.offload.path={tmp}",
    "MZ-606": "zero.offload.host_mb=16000000",
}


@pytest.mark.parametrize("code", FAULTS)
def test_what_cannot_serve_is_refused_in_one_line(
    code: str, tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    if code == "MZ-605":
        monkeypatch.setattr("megazero.run.disks.file_system_of", lambda folder: "nfs4")
    fault = FAULTS[code].format(tmp=tmp_path)
    options = [fault] if "path" in fault else [f"zero.offload.path={tmp_path}", fault]
    config = tiny_data.load(tmp_path / "run", *NVME, *options)
    with pytest.raises(UserError, match=code) as caught:
        open_disks(config, torch.device("cpu"), Ledger())
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written(tiny_data: TinyData, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/none")
    else:
        place = tmp_path / "closed"
        place.mkdir(mode=0o500)
    options = (*NVME, f"zero.offload.path={place}")
    done = command("train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", *options)
    assert done.returncode == 1 and done.stderr.startswith("MZ-601") and done.stderr.count("\n") == 1, done.stderr
