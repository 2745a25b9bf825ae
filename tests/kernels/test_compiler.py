"""A compiler ends with whoever waits for it, and leaves nothing behind; where its library was built does not matter."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megazero.kernels import build, cpu
from megazero.kernels.build import build_library
from tests.tiny_run import ROOT

# Says with its process' number that it has begun, and with another process of its own goes on for an hour.
SLOW = """#!/bin/sh
[ "$1" = --version ] && exit
for last; do :; done
echo half > "$last"
sleep 3600 &
echo $$ $! > {started}.new && mv {started}.new {started}
wait
"""
BUILD = """
import signal, sys
from pathlib import Path
from megazero.kernels.build import build_library
{before}
build_library(Path(sys.argv[1]), [sys.argv[2]], [])
"""
NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def slow_compiler(folder: Path) -> tuple[Path, Path]:
    """(the compiler, the file that says it has begun)."""
    compiler, started = folder / "slow", folder / "started"
    compiler.write_text(SLOW.format(started=started))
    compiler.chmod(0o755)
    return compiler, started


def pids_of(started: Path, process: subprocess.Popen) -> list[int]:
    while not started.exists():
        assert process.poll() is None, "it ended before it compiled"
        time.sleep(0.01)
    return [int(word) for word in started.read_text().split()]


@NEEDS_LINUX
@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_ends_the_compiler_too(tmp_path: Path, number: signal.Signals) -> None:
    source = tmp_path / "tiny.cpp"
    source.write_text("int value() { return 1; }\n")
    compiler, started = slow_compiler(tmp_path)
    line = [sys.executable, "-c", BUILD.format(before=""), source, compiler]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(line, cwd=ROOT, env=env, stderr=subprocess.PIPE) as process:
        pids = pids_of(started, process)
        process.send_signal(number)
        process.communicate()
    deadline = time.monotonic() + 30  # who is killed is not waited for by its guard
    while any(lives(pid) for pid in pids) or list((tmp_path / "cache/megazero").glob("*.tmp")):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.01)
    assert process.returncode != 0


def test_where_torch_lies_does_not_decide_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "tiny.cpp"
    source.write_text("int value() { return 1; }\n")
    gcc = build.find_gcc()
    made = {build_library(source, [gcc, "-shared", "-fPIC"], [], folders=[f"-I{tmp_path / n}"]) for n in ("a", "b")}
    assert len(made) == 1
    made.add(build_library(source, [gcc, "-shared", "-fPIC", "-O1"], []))
    assert len(made) == 2, "flags do"
    monkeypatch.setattr(torch, "__version__", "9.9")
    made.add(build_library(source, [gcc, "-shared", "-fPIC"], []))
    assert len(made) == 3, "and torch's version"


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("readelf") is None, reason="no g++ or readelf")
def test_another_environment_with_the_same_torch_takes_the_library(tmp_path: Path) -> None:
    """Torch is found at another path there, as in a second environment, which is gone when the library is used."""
    library = build.build_cpu(cpu._SOURCE)
    dynamic = subprocess.run(["readelf", "--dynamic", "--wide", library], capture_output=True, text=True, check=True)
    assert "libtorch_cpu.so" in dynamic.stdout and "PATH" not in dynamic.stdout, "it names no folder of an environment"
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    code = "from megazero.kernels import build, cpu; import torch; cpu.load(); print(build.build_cpu(cpu._SOURCE))\n"
    code += "x = torch.ones(3, dtype=torch.float32); y = torch.empty(3, dtype=torch.bfloat16)\n"
    code += "from megazero.kernels import schema; torch.ops.megazero.cast_(y, x); print(y.sum().item(), torch.__file__)"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == [str(library), "3.0", str(tmp_path / "torch" / "__init__.py")]
