"""The builder of kernels: one library, whoever starts at once, and one line for whatever is in the way."""

import ctypes
import multiprocessing
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megazero.kernels.build import BuildError, build_cpu, build_cuda, build_library

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small one, which compiles in a moment."""
    path = tmp_path / "tiny.cpp"
    path.write_text("int value() { return 1; }\n")
    return path


def _build_in(cache: str, source: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    assert build_cpu(source).exists()


def test_many_builders_at_once_leave_one_library(tmp_path: Path, source: Path) -> None:
    context = multiprocessing.get_context("fork")
    builders = [context.Process(target=_build_in, args=(str(tmp_path), source)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert sorted(path.suffix for path in (tmp_path / "megazero").iterdir()) == [".lock", ".sha256", ".so"]


def test_another_header_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, header = tmp_path / "tiny.cpp", tmp_path / "tiny" / "value.h"
    source.write_text('#include "tiny/value.h"\nint value() { return VALUE; }\n')
    header.parent.mkdir()
    libraries = set()
    for value in (1, 2, 1):
        header.write_text(f"#define VALUE {value}\n")
        libraries.add(build_cpu(source))
    assert len(libraries) == 2


def test_a_source_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    with pytest.raises(BuildError, match=r"broken\.cpp: .*error"):
        build_cpu(broken)
    assert not list((tmp_path / "cache" / "megazero").glob("*.so*"))
    assert not list((tmp_path / "cache" / "megazero").glob("*.tmp"))


def test_who_waited_for_a_compiler_that_fails_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tries, the others hear of it; the next start tries again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, tries, compiler = tmp_path / "tiny.cpp", tmp_path / "tries", tmp_path / "slow"
    source.write_text("int value() { return 1; }\n")
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\necho once >> {tries}\nsleep 1\necho error: full >&2\nexit 1\n'
    )
    compiler.chmod(0o755)

    def attempt(_: int) -> str:
        with pytest.raises(BuildError) as caught:
            build_library(source, [str(compiler)], [])
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        said = set(pool.map(attempt, range(4)))
    assert said == {f"{compiler} failed on tiny.cpp: error: full"}
    assert tries.read_text().count("once") == 1
    attempt(0)
    assert tries.read_text().count("once") == 2


def test_a_cache_that_can_only_be_read(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build_cpu(source)

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert build_cpu(source) == library


def test_a_folder_that_may_not_be_entered(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path.exists raises then, where it says False of a file that is not there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(BuildError, match=r"cannot be used.*Permission denied"):
        build_cpu(source)


def test_without_a_home_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        build_cpu(source)


def test_the_cache_folder_cannot_be_used(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megazero").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="cannot be used"):
        build_cpu(source)


def test_a_truncated_library_is_built_again(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping one ends the process by SIGBUS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build_cpu(source)
    whole = library.read_bytes()
    for content in (b"", whole[:100], whole[:-1], whole + b"x", bytes(len(whole))):
        library.write_bytes(content)
        assert build_cpu(source).read_bytes() == whole
    library.with_suffix(".sha256").write_text("0" * 64)
    assert build_cpu(source).read_bytes() == whole
    assert ctypes.CDLL(str(library))._Z5valuev() == 1


def test_a_library_that_somebody_else_can_change_is_built_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced, whatever it holds; so is a link to a library elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build_cpu(source)
    library.chmod(0o777)
    assert stat.S_IMODE(build_cpu(source).stat().st_mode) == 0o755
    elsewhere = tmp_path / "elsewhere.so"
    library.rename(elsewhere)
    library.symlink_to(elsewhere)
    assert not build_cpu(source).is_symlink()
    if os.getuid() == 0:  # only root gives files away
        os.chown(library, 12345, 12345)
        assert build_cpu(source).stat().st_uid == 0


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_below_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    build_cpu(source)
    cache.chmod(mode)
    with pytest.raises(BuildError, match=rf"cache can be written by others \(mode {mode:o}\): chmod go-w"):
        build_cpu(source)


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_a_cache_of_ours_that_others_could_write_to_is_taken_from_them(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """As an earlier version has made it where new folders are the group's; what others have put there is not loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build_cpu(source)
    whole = library.read_bytes()
    library.parent.chmod(mode)
    library.write_bytes(b"somebody else's")
    library.chmod(0o666)
    assert build_cpu(source).read_bytes() == whole
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_somebody_elses_cache_is_not_used(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_cpu(source)
    os.chown(tmp_path / "megazero", 12345, 12345)
    with pytest.raises(BuildError, match="belongs to user 12345: set XDG_CACHE_HOME"):
        build_cpu(source)


def test_the_cache_is_private_whatever_the_umask(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    before = os.umask(0)
    try:
        library = build_cpu(source)
    finally:
        os.umask(before)
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in [library.parent, *library.parent.iterdir()]}
    assert modes == {"": 0o700, ".lock": 0o600, ".sha256": 0o644, ".so": 0o755}


def test_a_fifo_in_the_place_of_the_lock(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would block for ever, and no signal would end that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build_cpu(source)
    library.unlink()
    library.with_suffix(".lock").unlink()
    os.mkfifo(library.with_suffix(".lock"))
    with pytest.raises(BuildError, match="cannot be used"):
        build_cpu(source)


# ---- libraries that were built elsewhere


@pytest.fixture
def shipped(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in a folder that MEGAZERO_KERNELS names, on a machine with an empty cache and no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "maker"))
    made, folder = build_cpu(source), tmp_path / "shipped"
    folder.mkdir(mode=0o755)
    for path in (made, made.with_suffix(".sha256")):
        shutil.copy2(path, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("MEGAZERO_KERNELS", str(folder))
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder / made.name


def test_a_shipped_library_needs_no_compiler(source: Path, shipped: Path) -> None:
    assert build_cpu(source) == shipped
    assert ctypes.CDLL(str(shipped))._Z5valuev() == 1


def test_without_a_compiler_the_cache_s_library_does(
    source: Path, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on nodes that share a home folder with one that has a compiler."""
    monkeypatch.delenv("MEGAZERO_KERNELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "maker"))
    assert build_cpu(source) == tmp_path / "maker" / "megazero" / shipped.name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    with pytest.raises(BuildError, match=r"^no g\+\+ on this machine$"):
        build_cpu(source)


def test_a_shipped_library_of_other_sources_is_not_taken(source: Path, shipped: Path) -> None:
    source.write_text("int value() { return 2; }\n")
    with pytest.raises(BuildError, match=rf"no g\+\+ on this machine, nor is its library in {shipped.parent}"):
        build_cpu(source)


def test_a_shipped_library_is_taken_before_a_compiler_is_asked(
    source: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MEGAZERO_KERNELS", str(shipped.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shipped.parent / "none"))
    assert build_cpu(source) == shipped and not (shipped.parent / "none").exists()


@pytest.mark.parametrize("damage", ["content", "hash", "mode", "folder", "missing"])
def test_a_shipped_library_that_cannot_be_trusted_is_not_loaded(source: Path, shipped: Path, damage: str) -> None:
    expected = "nor is its library in"
    if damage == "content":
        shipped.write_bytes(shipped.read_bytes() + b"x")
    elif damage == "hash":
        shipped.with_suffix(".sha256").unlink()
    elif damage == "mode":
        shipped.chmod(0o777)
    elif damage == "folder":
        shipped.parent.chmod(0o777)
        expected = r"libraries of MEGAZERO_KERNELS are not used: .* can be written by others"
    else:
        shutil.rmtree(shipped.parent)
        expected = "libraries of MEGAZERO_KERNELS are not used: .*No such file"
    with pytest.raises(BuildError, match=expected):
        build_cpu(source)


def test_a_library_for_several_gpus_serves_each_of_them(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by a stand-in for nvcc, which a node with the GPU does not have."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\n'
        '[ "$1" = --list-gpu-arch ] && echo compute_80 compute_90 && exit\n'
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    made = build_cuda(source, [90, 80])
    assert "-sm80-sm90-" in made.name
    nvcc.unlink()
    assert build_cuda(source, [90]) == build_cuda(source, [80]) == build_cuda(source, [80, 90]) == made
    for archs, spills in (([120], False), ([80, 120], False), ([90], True)):
        with pytest.raises(BuildError, match="no nvcc"):
            build_cuda(source, archs, spills=spills)
