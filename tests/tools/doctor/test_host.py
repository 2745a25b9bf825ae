"""Shares of a machine, from made-up control groups; speeds of a real disk."""

import resource
from pathlib import Path

import pytest

from megazero.base.machine import cgroup_limits, free_memory, job_memory
from megazero.extensions.homes import HOMES
from megazero.tools.doctor.finding import amount, duration
from megazero.tools.doctor.host import direct, disk, limits


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("listing", "files", "expected"),
    [
        ("0::/\n", {}, (None, None)),
        ("0::/\n", {"memory.max": "1000\n", "cpu.max": "150000 100000\n"}, (1.5, 1000)),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "500", "a/b/cpu.max": "max 100000\n"}, (None, 500)),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, (2.0, None)),
    ],
    ids=["none", "container", "parent", "the-least"],
)
def test_limits_of_cgroups(tmp_path: Path, listing: str, files: dict[str, str], expected):
    root = tree(tmp_path, {"proc/self/cgroup": listing, "proc/meminfo": "MemTotal: 8 kB\nMemFree: 1 kB\n"} | files)
    assert cgroup_limits(tmp_path / "proc/self/cgroup", root) == expected
    assert job_memory(tmp_path / "proc", root) == min(8192, expected[1] or 8192)


def test_no_listing_is_no_limit(tmp_path: Path):
    assert cgroup_limits(tmp_path / "none", tmp_path) == (None, None)
    assert 0 < free_memory() <= job_memory()


def test_limit_of_a_process_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4_000_000_000, resource.RLIM_INFINITY))
    (finding,) = limits()
    assert finding.text.endswith("4 GB of address space for each process (ulimit -v)")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (finding,) = limits()
    assert "address_space_bytes" not in finding.values and finding.text


def test_disk_of_a_folder_to_come(tmp_path: Path):
    (room,) = disk(tmp_path / "a/b")
    assert room.values["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_disk_that_cannot_be_written():
    _, speed = disk(Path("/proc/self"))
    assert speed.state == "missing" and speed.text.startswith("cannot be written") and "--run" in speed.do


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (amount(0, "B"), "0 B"),
        (amount(999, "B"), "999 B"),
        (amount(999.7e6, "B/s"), "1000 MB/s"),
        (amount(12.345e9, "FLOP/s"), "12.3 GFLOP/s"),
        (amount(2.5e18, "FLOP/s"), "2500 PFLOP/s"),
        (duration(3.5e-5), "35 us"),
        (duration(0.0123), "12.3 ms"),
    ],
)
def test_units(shown: str, text: str):
    assert shown == text


def test_a_disk_is_read_and_written_past_the_cache(tmp_path: Path) -> None:
    (found,) = direct(tmp_path / "runs")
    assert found.state == "there" and found.name == f"direct I/O of {tmp_path / 'runs'}"
    assert min(found.values["read_bandwidth"], found.values["write_bandwidth"]) > 0
    assert found.values["depth"] >= 1 and "in flight" in found.text
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_has_no_direct_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megazero.extensions.homes.HOMES", {"nvme": HOMES["nvme"]._replace(speed=refuse)})
    (found,) = direct(tmp_path)
    assert found.state == "unknown" and "No space left on device" in found.text
