"""`megazero doctor`: what it finds is really there, what is missing is said, and nothing that fails is a traceback."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from megazero.__main__ import main
from megazero.base.machine import job_memory
from megazero.tools.doctor import doctor, host, ranks, software
from megazero.tools.doctor.finding import Finding, examine
from megazero.tools.doctor.ranks import Measured
from tests.tiny_run import fresh_command

LINKS = {"shared memory all-reduce": 2e9, "shared memory all-gather": 3e9, "sockets all-reduce": 1e9}
LINKS |= {"shared memory": 2.5e9, "sockets": 1e9}
FIGURES = {"threads": {"count": 1.0}, "matmul fp32": {"flops": 5e10}, "memory copy": {"bandwidth": 2e10}}
FIGURES |= {name: {"bandwidth": rate, "latency": 1e-4} for name, rate in LINKS.items()}
HARDWARE = {"name", "memory_bytes", "peak_flops", "memory_bandwidth", "devices_per_node", "in_node", "cross_node"}
HARDWARE |= {"host_link_bandwidth", "host_memory_bytes", "launch", "reached", "nccl_channels"}


class Answer(NamedTuple):
    """Of one real run: what it printed, and the hardware file."""

    shown: dict[str, Any]
    file: dict[str, Any]
    run_folder: Path


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("doctor")
    file = folder / "machine.yaml"
    result = fresh_command("-m", "megazero", "doctor", "--run", folder / "runs/next", "--json", "--write", file)
    assert result.returncode == 0 and result.stderr in ("", f"warning: {file}: {doctor.BUSY}\n"), result.stderr
    return Answer(json.loads(result.stdout), YAML(typ="safe", pure=True).load(file), folder / "runs")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have measured FIGURES, and a disk that is measured with little."""
    monkeypatch.setattr(host, "_MOST", 1 << 20)
    one = Measured(2, FIGURES, {"matmul fp16": "RuntimeError: no such product"})
    monkeypatch.setattr(ranks, "measure", lambda size, room, on_gpus: (one, one))


def findings(shown: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for part in shown["parts"].values() for finding in part]


@pytest.mark.full
def test_findings_of_this_machine(answer: Answer):
    shown = answer.shown
    assert list(shown["parts"]) == ["machine", "software", "devices", "network", "disk"] and shown["missing"] == []
    found = findings(shown)
    names = [finding["name"] for finding in found]
    assert len(set(names)) == len(names)
    for finding in found:
        assert set(finding) == {"name", "text", "state", "do", "values"} and "\n" not in finding["text"]
        assert finding["state"] in ("there", "absent") or finding["name"] == "load"  # a machine may be busy
        assert finding["text"]
        assert bool(finding["do"]) == (finding["state"] == "absent"), finding
        assert all(math.isfinite(v) and v > 0 for v in finding["values"].values()), finding
    wanted = {"processor", "load", "memory", "torch", "packages", "matmul fp32", "matmul bf16", "memory copy"}
    wanted |= {"attention fp32", "launch"}
    assert wanted <= set(names)
    assert {"sockets all-reduce", "sockets all-gather", "to other hosts"} <= set(names)
    assert not answer.run_folder.exists(), "it only looks"


@pytest.mark.full
def test_figures_are_those_of_some_machine(answer: Answer):
    values = {finding["name"]: finding["values"] for finding in findings(answer.shown)}
    assert 1e7 < values["matmul fp32"]["flops"] < 1e15
    assert 1e8 < values["memory copy"]["bandwidth"] < 1e13
    for road in ("sockets all-reduce", "sockets all-gather"):
        assert 1e-7 < values[road]["latency"] < 1.0
        assert 1e6 < values[road]["bandwidth"] < values["memory copy"]["bandwidth"] * 4
    (disk,) = (v for name, v in values.items() if name.startswith("direct I/O of"))
    assert 1e4 < disk["write_bandwidth"] < 1e12


@pytest.mark.full
def test_the_file_is_what_was_shown(answer: Answer):
    file, shown = answer.file, answer.shown["hardware"]
    assert set(file) == set(shown) == HARDWARE
    assert set(file["peak_flops"]) == {"fp32", "fp64", "bf16", "fp16"}
    for name in ("memory_bandwidth", "host_link_bandwidth"):
        assert isinstance(file[name], float) and file[name] == pytest.approx(shown[name], rel=1e-3)
    for name in ("in_node", "cross_node"):
        assert file[name] == pytest.approx(shown[name], rel=1e-3) and set(file[name]) == {"bandwidth", "latency"}
    assert file["peak_flops"] == pytest.approx(shown["peak_flops"], rel=1e-3)
    assert file["launch"] == pytest.approx(shown["launch"], rel=1e-3) and 0 < file["launch"] < 1e-2
    assert file["reached"] == pytest.approx(shown["reached"], abs=1e-4) and 0 < file["reached"]["attention"] <= 1
    assert {n: file[n] for n in ("name", "devices_per_node")} == {n: shown[n] for n in ("name", "devices_per_node")}
    assert file["memory_bytes"] * file["devices_per_node"] <= job_memory()


def test_as_text(measured, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(host.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and [line for line in lines if line in ("machine", "software", "devices", "network", "disk")]
    assert "  matmul fp32                50 GFLOP/s (2 at once, 1 thread each)" in lines
    assert "  shared memory all-reduce   2 GB/s, latency 100 us (2 at once, 1 thread each)" in lines
    assert "? matmul fp16                RuntimeError: no such product" in lines
    assert "nothing that training needs is missing" in lines


@pytest.mark.parametrize("load", [0.0, 17.2], ids=["quiet", "busy"])
def test_a_busy_machine_is_said(measured, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: float):
    monkeypatch.setattr(host.os, "getloadavg", lambda: (load, load, load))
    file = tmp_path / "machine.yaml"
    assert main(["doctor", "--run", str(tmp_path), "--write", str(file)]) == 0 and file.exists()
    out, err = capsys.readouterr()
    assert (out.splitlines()[-1] == doctor.BUSY) == (load > 1)
    assert (err == f"warning: {file}: {doctor.BUSY}\n") if load > 1 else (err == "")
    assert ("? load                       busy: 17.2 processes ran" in out) == (load > 1)


def test_no_compiler_is_a_line(measured, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(software, "_INSTALLED", tmp_path)
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("g++", "nvcc"):
        (line,) = (line for line in lines if line.startswith(f"- {name} "))
        assert "not found; install" in line


@pytest.mark.parametrize(
    ("module", "probe", "state", "code"),
    [
        (host, "processor", "unknown", 0),
        (software, "packages", "missing", 1),
        (software, "torch_backends", "missing", 1),
    ],
)
def test_probe_that_raises_is_a_line(
    measured, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module, probe: str, state: str, code: int
):
    def broken() -> Iterator[Finding]:
        yield Finding("before", "it broke")
        raise OSError(5, "the sensor\nis gone")

    monkeypatch.setattr(module, probe, broken)
    assert main(["doctor", "--run", str(tmp_path), "--json"]) == code
    out, err = capsys.readouterr()
    found = {finding["name"]: finding for finding in findings(json.loads(out))}
    name = "torch" if probe == "torch_backends" else probe
    assert found[name]["text"] == "OSError: [Errno 5] the sensor is gone" and found[name]["state"] == state
    assert found["before"]["state"] == "there" and err == ""


def test_without_torch_nothing_is_measured(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_torch() -> Iterator[Finding]:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(software, "torch_backends", no_torch)
    monkeypatch.setattr(ranks, "measure", None)
    assert main(["doctor", "--run", str(tmp_path), "--write", str(tmp_path / "a.yaml")]) == 1
    out, err = capsys.readouterr()
    assert "! torch                      ModuleNotFoundError: No module named 'torch'" in out
    assert "missing: torch" in out.splitlines()
    assert err == (
        f"MZ-340 doctor: {tmp_path}/a.yaml is not written: torch does not work here; see the output of doctor\n"
    )
    assert not (tmp_path / "a.yaml").exists()


def test_ranks_that_cannot_be_had_are_missing(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def forbidden(size: int, room: int, *, on_gpus: bool) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ranks, "measure", forbidden)
    assert main(["doctor", "--run", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "! local ranks                BlockingIOError: [Errno 11] Resource temporarily unavailable" in out
    assert err == ""
    assert "missing: local ranks" in out.splitlines()


def test_ranks_that_broke_show_what_they_had(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    had = Measured(2, {"matmul fp32": {"flops": 1e10}}, {"sockets": "MZ-311 x"}, "MZ-311 rank=1: did not answer")
    monkeypatch.setattr(ranks, "measure", lambda size, room, on_gpus: (had, had))
    assert main(["doctor", "--run", str(tmp_path), "--write", str(tmp_path / "a.yaml")]) == 1
    out, err = capsys.readouterr()
    assert out.count("MZ-311 rank=1: did not answer") == 1 and "10 GFLOP/s" in out
    assert "MZ-340 doctor" in err and "not measured: memory copy, host copy, messages between ranks" in err


def test_folders_that_cannot_be_written(measured, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert main(["doctor", "--run", str(tmp_path), "--write", str(tmp_path / "none/a.yaml")]) == 1
    line = f"MZ-405 doctor: {tmp_path}/none/a.yaml: No such file or directory; give another path to --write\n"
    assert capsys.readouterr().err == line

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host, "write_all", full)
    assert main(["doctor", "--run", str(tmp_path)]) == 1
    assert f"missing: disk of {tmp_path}" in capsys.readouterr().out.splitlines()


def test_parts_of_the_page_are_those_of_the_answer(measured, tmp_path: Path):
    found = doctor.diagnose(tmp_path, 2)
    assert json.loads(json.dumps(doctor.as_json(found)))["hardware"]["in_node"] == {
        "bandwidth": 2.5e9,
        "latency": 1e-4,
    }
    assert found.missing == []


def test_a_reason_is_one_short_line():
    def odd() -> Iterator[Finding]:
        raise RuntimeError("x\n" * 1000)

    (finding,) = examine("odd", odd)
    assert finding.text.startswith("RuntimeError: x x") and len(finding.text) == 300 and finding.state == "unknown"
