"""Runs whose state is on disks: the same numbers and checkpoints, nothing left behind, one line where it cannot be."""

import os
import re
from pathlib import Path

import pytest
import torch

from megazero.base.errors import UserError
from megazero.comm.grid import Grid
from megazero.comm.ledger import Ledger
from megazero.config.schema import Config
from megazero.extensions.homes import HOMES
from megazero.nvme import opening
from megazero.nvme.disk_queue import BLOCK, DEPTH, DiskQueue, Engine
from megazero.observe.jsonl import read_rows
from megazero.run.disks import open_disks, ranks_here
from megazero.run.folder import RunFolder
from tests.ranks import run_ranks
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
    """Rows and checkpoints, bit for bit."""
    disk = (*NVME, f"zero.offload.path=[{tmp_path / 'a'},{tmp_path / 'b'}]")
    there = run(tiny_data, tmp_path / "there", *disk)
    here = run(tiny_data, tmp_path / "here", "zero.stage=3")
    assert numbers(there) == numbers(here)
    assert saved_bytes(there) == saved_bytes(here)
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]


@pytest.mark.full
def test_a_run_in_memory_goes_on_from_one_on_disks_and_the_other_way_round(tiny_data: TinyData, tmp_path: Path) -> None:
    disk = (*NVME, f"zero.offload.path=[{tmp_path / 'a'},{tmp_path / 'b'}]")
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
    assert re.search(r", \d+ blocks of \d+ KiB in flight \(read \d+\.\d\d, written \d+\.\d\d GB/s\); ", line)


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
        open_disks(HOMES, config, torch.device("cpu"), Ledger())
    assert "\n" not in str(caught.value)


def test_memory_is_needed_for_all_ranks_of_a_host(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough for three ranks: four are refused, in one line that says how many there are."""
    monkeypatch.setattr("megazero.run.disks.free_memory", lambda: 3 * 200 << 20)
    config = tiny_data.load(tmp_path / "run", *NVME, f"zero.offload.path={tmp_path}", "zero.offload.host_mb=200")
    for here in (1, 3):
        found = open_disks(HOMES, config, torch.device("cpu"), Ledger(), here)
        assert found is not None
        found.close()
    with pytest.raises(UserError, match=r"MZ-606.*host_mb=200 MiB .* for each of 4 ranks here, got 600 MiB"):
        open_disks(HOMES, config, torch.device("cpu"), Ledger(), 4)


def counted(grid: Grid, config: Config, place: str) -> int:
    os.environ["SLURMD_NODENAME"] = f"{place}{grid['world'].rank // 2}"
    return ranks_here(config, grid, torch.device("cpu"))


def test_ranks_of_a_host_are_counted(tiny_data: TinyData, tmp_path: Path) -> None:
    """Three ranks, of which two call their host the same."""
    config = tiny_data.load(tmp_path / "run", *NVME, f"zero.offload.path={tmp_path}")
    assert run_ranks(3, counted, config, "node") == [2, 2, 1]
    plain = tiny_data.load(tmp_path / "run", "zero.stage=3")
    assert run_ranks(1, counted, plain, "node") == [1]


def test_the_queue_is_what_was_measured_to_be_best(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, int]] = []

    class Noted(DiskQueue):
        def __init__(self, engine: Engine | None = None, *, depth: int = DEPTH, block: int = BLOCK):
            asked.append({"depth": depth, "block": block})
            super().__init__(engine, depth=depth, block=block)

    honest = opening.best_speed
    best = lambda *arguments: honest(*arguments)._replace(depth=3, block=8192)  # noqa: E731
    monkeypatch.setattr(opening, "DiskQueue", Noted)
    monkeypatch.setattr(opening, "best_speed", best)
    config = tiny_data.load(tmp_path / "run", *NVME, f"zero.offload.path={tmp_path}")
    found = open_disks(HOMES, config, torch.device("cpu"), Ledger())
    assert found is not None and asked[-1] == {"depth": 3, "block": 8192}
    found.close()


def test_a_measurement_that_is_out_of_time_tries_one_setting(tmp_path: Path) -> None:
    found = opening.best_speed(tmp_path, 1 << 20, 0.0)
    assert (found.depth, found.block) == (DEPTH, BLOCK) and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tiny_data: TinyData, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/none")
    else:
        place = tmp_path / "closed"
        place.mkdir(mode=0o500)
    options = (*NVME, f"zero.offload.path={place}")
    done = command("train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", *options)
    assert done.returncode == 1 and done.stderr.startswith("MZ-601") and done.stderr.count("\n") == 1, done.stderr
