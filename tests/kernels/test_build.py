"""The builder of kernels: one library, whoever starts at once, and one line for whatever is in the way."""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megazero.kernels import build, cpu
from megazero.kernels.build import BuildError, build_cpu, build_cuda, build_library
from tests.processes import alive
from tests.tiny_run import ROOT

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one, which compiles in a moment, and an empty cache for its libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    path = tmp_path / "tiny.cpp"
    path.write_text("int value() { return 1; }\n")
    return path


def plain(source: Path, *options: str, folders: list[str] | None = None) -> Path:
    return build_library(source, build.find_gcc, ["-shared", "-fPIC", *options], folders=folders or [])


def compiler(folder: Path, script: str) -> Path:
    """A stand-in for a compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_many_builders_at_once_leave_one_library(tmp_path: Path, source: Path) -> None:
    tries = tmp_path / "tries"
    slow = compiler(tmp_path, f'echo once >> {tries}; sleep 0.3; while [ "$1" != -o ]; do shift; done; echo it > "$2"')
    context = multiprocessing.get_context("fork")
    builders = [context.Process(target=build_library, args=(source, lambda: str(slow), [])) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0, 0, 0] and tries.read_text() == "once\n"
    assert sorted(path.suffix for path in (tmp_path / "user/megazero").iterdir()) == [".lock", ".sha256", ".so"]


def test_the_name_is_made_of_what_decides_the_code(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = source.with_suffix("") / "value.h"
    header.parent.mkdir()
    source.write_text('#include "tiny/value.h"\nint value() { return VALUE; }\n')
    libraries = set()
    for value in (1, 2, 1):
        header.write_text(f"#define VALUE {value}\n")
        libraries.add(plain(source))
    assert len(libraries) == 2, "a header does"
    libraries.add(plain(source, folders=["-I/nowhere"]))
    assert len(libraries) == 2, "where torch lies does not"
    libraries.add(plain(source, "-O1"))
    monkeypatch.setattr(torch, "__version__", "9.9")
    libraries.add(plain(source))
    assert len(libraries) == 4, "flags and torch's version do"


def test_a_source_that_does_not_compile(tmp_path: Path, source: Path) -> None:
    source.write_text("int main( {")
    with pytest.raises(BuildError, match=r"tiny\.cpp: .*error"):
        build_cpu(source)
    assert [path.suffix for path in (tmp_path / "user/megazero").iterdir()] == [".lock"]


BUILD = """
import sys
from pathlib import Path
from megazero.kernels.build import build_library
build_library(Path(sys.argv[1]), lambda: sys.argv[2], [])
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.usefixtures("usual_signals")
def test_an_interruption_ends_the_compiler_and_what_it_has_started(tmp_path: Path, source: Path) -> None:
    """And gives the lock back, as a kill does."""
    started = tmp_path / "started"
    slow = compiler(tmp_path, f"sleep 3600 &\necho $$ $! > {started}.new && mv {started}.new {started}\nwait")
    line = [sys.executable, "-c", BUILD, source, slow]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE) as process:
        while not started.exists():
            assert process.poll() is None, "it ended before it compiled"
            time.sleep(0.01)
        process.send_signal(2)
        process.communicate()
    assert process.returncode != 0
    deadline = time.monotonic() + 30
    while any(alive(int(pid)) for pid in started.read_text().split()):
        assert time.monotonic() < deadline, "the compiler lives"
        time.sleep(0.01)
    assert [path.suffix for path in (tmp_path / "user/megazero").iterdir()] == [".lock"]
    assert plain(source).exists()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
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


def test_a_cache_that_can_only_be_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_cpu(source)

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert build_cpu(source) == library


def test_without_a_home_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        build_cpu(source)


def test_the_cache_folder_cannot_be_used(tmp_path: Path, source: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user/megazero").write_text("in the way")
    with pytest.raises(BuildError, match="cannot be used"):
        build_cpu(source)


def test_a_torn_library_is_built_again(source: Path) -> None:
    """Mapping one ends the process by SIGBUS."""
    library = plain(source)
    whole = library.read_bytes()
    for content in (b"", whole[:-1], bytes(len(whole))):
        library.write_bytes(content)
        assert plain(source).read_bytes() == whole
    library.with_suffix(".sha256").write_text("0" * 64)
    assert plain(source).read_bytes() == whole
    assert ctypes.CDLL(str(library))._Z5valuev() == 1


# ---- libraries that were built elsewhere


@pytest.fixture
def shipped(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in a folder that MEGAZERO_KERNELS names, on a machine with an empty cache and no compiler."""
    made, folder = build_cpu(source), tmp_path / "shipped"
    folder.mkdir()
    for path in (made, made.with_suffix(".sha256")):
        shutil.move(path, folder)
    monkeypatch.setenv("MEGAZERO_KERNELS", str(folder))
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder / made.name


def test_a_shipped_library_needs_no_compiler(source: Path, shipped: Path) -> None:
    assert build_cpu(source) == shipped
    assert ctypes.CDLL(str(shipped))._Z5valuev() == 1


@pytest.mark.parametrize("damage", ["content", "hash", "missing", "other sources"])
def test_a_shipped_library_that_does_not_fit_is_not_loaded(source: Path, shipped: Path, damage: str) -> None:
    if damage == "content":
        shipped.write_bytes(shipped.read_bytes() + b"x")
    elif damage == "hash":
        shipped.with_suffix(".sha256").unlink()
    elif damage == "missing":
        shutil.rmtree(shipped.parent)
    else:
        source.write_text("int value() { return 2; }\n")
    with pytest.raises(BuildError, match=rf"no g\+\+ on this machine, and no built library in {shipped.parent} or"):
        build_cpu(source)


def test_a_library_for_several_gpus_serves_each_of_them(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by a stand-in for nvcc, which a node with the GPU does not have."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done\necho library > "$2"').rename(nvcc)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    made = build_cuda(source, [90, 80])
    assert made.stem.endswith("-sm80-sm90")
    nvcc.unlink()
    assert build_cuda(source, [90]) == build_cuda(source, [80]) == build_cuda(source, [80, 90]) == made
    for archs, spills in (([120], False), ([80, 120], False), ([90], True)):
        with pytest.raises(BuildError, match="no nvcc"):
            build_cuda(source, archs, spills=spills)
