"""The builder that makes a shared library of C++ or CUDA sources, once per machine.

The library's name is made of hashes of what decides its code (sources, flags, torch, machine; then the compiler), so a
stale one is never loaded and nothing needs cleaning. Where torch and the compiler lie does not decide it: two
environments with the same torch share one library. Nor does it carry a path to torch's libraries: these are loaded
before it and the loader knows them by their names, and the path would be of an environment that may be gone.

What is loaded is checked against the hash of its own content too (`cache.py`). Many ranks may start at once: one
compiles under a file lock while the others wait, and the finished library appears by a rename, so a half-written one is
never loaded either. It lives in the user's cache folder (XDG_CACHE_HOME, else ~/.cache), with what the compiler said
beside it: nvcc's is the report of the resources that each kernel takes (`ptxas`).

A machine without a compiler takes a library that another one has made: from the folder that MEGAZERO_KERNELS names,
which comes first, or from the cache. Of its name all must fit but the compiler; it must be made for these GPUs, and
trusted as one of the cache is.
"""

import fcntl
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
import xxhash

from megazero.base.doing import doing
from megazero.base.files import flush_file, modified_at
from megazero.base.private_folder import UntrustedCacheError, cache_folder, make_private_folder, refuse_shared
from megazero.base.reading import read_file
from megazero.kernels.cache import is_sealed, seal
from megazero.kernels.compiler import compile_with

_LOG = logging.getLogger("megazero")
FOLDER_VARIABLE = "MEGAZERO_KERNELS"
_TORCH = Path(torch.__file__).parent
# The oldest torch whose stable ABI has what the sources use (parallel_for): 2.10.
_TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-ltorch_cpu", "-lc10"]
_TORCH_FOLDERS = [f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}"]
_CPU_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"]
# The runtime is linked in, so that the library loads where there is no CUDA too.
_CUDA_FLAGS = ["-O3", "-std=c++20", "-Xcompiler=-fPIC", "-shared", "-cudart=static", "-Xptxas=-v,-warn-spills"]
# A spilled register's traffic is nowhere in a kernel's account of bytes.
_NO_SPILLS = "-Xptxas=-Werror"
# The current stream is asked of torch's CUDA library by a weak symbol, which nothing resolves unless that library is
# among our own needs: Python loads torch's libraries out of each other's sight, and a linker leaves out what is only
# weakly needed. A torch without CUDA has no such library, and is never asked.
_CUDA_NEEDS = "-Xlinker=--no-as-needed," + (
    "-ltorch_cuda" if (_TORCH / "lib" / "libtorch_cuda.so").exists() else "-ltorch"
)
_OLDEST_ARCH = 70  # Volta: older ones have no tensor cores, and nobody trains on them
_REASON_BYTES = 4096
_LOCK_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO is an error at once
_RELEASE_ARCHS = (80, 90, 100, 120)


class BuildError(RuntimeError):
    """The error that there is no compiler, or that it failed; the text is one line."""


def build_cpu(source: Path) -> Path:
    """Return the shared library of a C++ source, one that lies ready or is compiled with g++ now.

    Args:
        source: may include headers from the folder beside it that has its name, and no others of ours.

    Raises:
        BuildError: none lies ready, and there is no compiler, it failed, or the cache folder cannot be written.
    """
    return _ready_or_built(
        _key(source, (), [*_CPU_FLAGS, *_TORCH_FLAGS]),
        (),
        lambda: build_library(source, [find_gcc(), *_CPU_FLAGS], _TORCH_FLAGS, folders=_TORCH_FOLDERS),
    )


def build_cuda(source: Path, archs: Sequence[int], *, spills: bool = False) -> Path:
    """Return the shared library of a CUDA source, one that lies ready or is compiled with nvcc now.

    Args:
        source: may include headers from the folder beside it that has its name, and no others of ours.
        archs: compute capabilities, 90 for 9.0.
        spills: take a kernel that spills registers, too. A run does: with a compiler or a GPU that nobody has tried,
            one slow kernel is better than none.

    Raises:
        BuildError: none lies ready, and there is no compiler, it does not know one of `archs`, it failed, a kernel
            spills registers, or the cache folder cannot be written.
    """
    options, libraries = [*_CUDA_FLAGS, *([] if spills else [_NO_SPILLS])], [*_TORCH_FLAGS, _CUDA_NEEDS]

    def build() -> Path:
        nvcc = find_nvcc()
        known = known_archs(nvcc)
        if unknown := sorted(set(archs) - set(known)):
            raise BuildError(f"{nvcc} does not know sm_{unknown[0]}; it knows sm_{known[0]} to sm_{known[-1]}")
        return build_library(source, [nvcc, *options], libraries, folders=_TORCH_FOLDERS, archs=archs)

    return _ready_or_built(_key(source, (), [*options, *libraries]), archs, build)


def build_library(
    source: Path,
    command: Sequence[str],
    libraries: Sequence[str],
    headers: Sequence[Path] = (),
    folders: Sequence[str] = (),
    archs: Sequence[int] = (),
) -> Path:
    """Return the shared library that `command` makes of a source; run it if that has not been done before.

    A read-only cache is enough if it holds the library. A process that waited while another process' compiler failed
    raises that compiler's error and does not try again: eight ranks would fail one after the other.

    Args:
        command: the compiler and its options.
        libraries: options that follow the source.
        headers: what the source includes beside the headers in the folder that has its name.
        folders: options that name folders of torch's version, and so are no part of the library's name.
        archs: compute capabilities to compile for; the name says which, beside the hashes.

    Raises:
        BuildError: the compiler failed, or the cache folder cannot be written.
    """
    # A compiler is told by what it says of itself.
    made_by = xxhash.xxh3_64_hexdigest(_said([command[0], "--version"]).encode())
    key = _key(source, headers, [*command[1:], *libraries])
    name = "-".join([key, *(f"sm{arch}" for arch in sorted(archs)), made_by]) + ".so"
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in sorted(archs)]
    folder = _cache_folder()
    library, failed = folder / name, (folder / name).with_suffix(".failed")
    try:
        make_private_folder(folder)
        if is_sealed(library):
            return library
        earlier = modified_at(failed)
        with _locked(library.with_suffix(".lock")):
            if modified_at(failed) not in (None, earlier) and (reason := _reason(failed)):
                raise BuildError(reason)
            if not is_sealed(library):
                with doing(f"compiling {source.name}"):
                    _compile(source, [*command, *targets], [*folders, *libraries], library, failed)
    except UntrustedCacheError as error:
        raise BuildError(f"the kernel cache is not used: {error}") from None
    except OSError as error:
        raise BuildError(f"the kernel cache {folder} cannot be used: {error}") from None
    return library


def find_gcc() -> str:
    """Return the path of g++; raise BuildError where there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ on this machine")
    return compiler


def find_nvcc() -> str:
    """Return the path of nvcc: in CUDA_HOME, else on the PATH, else the newest in /usr/local.

    Raises:
        BuildError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    installed = sorted(
        Path("/usr/local").glob("cuda*/bin"), key=lambda folder: _numbers(folder.parent.name), reverse=True
    )
    for folder in [f"{home}/bin"] if home else [None, *map(str, installed)]:
        if nvcc := shutil.which("nvcc", path=folder):
            return nvcc
    raise BuildError(f"no nvcc in {home}/bin (CUDA_HOME)" if home else "no nvcc on the PATH or in /usr/local/cuda*")


def known_archs(nvcc: str) -> list[int]:
    """Return the compute capabilities that nvcc compiles for, ascending, from 70 on."""
    lines = _said([nvcc, "--list-gpu-arch"]).split()
    archs = sorted(int(line.removeprefix("compute_")) for line in lines if line.startswith("compute_"))
    if not archs:
        raise BuildError(f"{nvcc} does not say what it compiles for")
    return [arch for arch in archs if arch >= _OLDEST_ARCH]


def release_archs(nvcc: str) -> list[int]:
    """Return the architectures of a library for any machine: the oldest that nvcc knows, 80, 90, 100 and 120."""
    known = known_archs(nvcc)
    return sorted({known[0], *(arch for arch in _RELEASE_ARCHS if arch in known)})


@cache
def open_library(library: Path) -> None:
    """Load the operations of a library into torch; raise BuildError if it cannot be loaded."""
    try:
        torch.ops.load_library(library)
    except OSError as error:  # a cache on a file system that forbids execution, say
        raise BuildError(f"{library} cannot be loaded: {error.__cause__ or error}") from None


def compiler_report(library: Path) -> str:
    """Return what the compiler said when it made `library`; raise FileNotFoundError if it said nothing."""
    return library.with_suffix(".log").read_text(encoding="utf-8")


def _key(source: Path, headers: Sequence[Path], options: Sequence[str]) -> str:
    """Return the name of a source with a hash of what decides the code of its library, but for the compiler."""
    machine = [platform.machine(), *platform.libc_ver()]  # a home folder may be shared by unlike machines
    of_torch = [torch.__version__, str(torch.version.git_version)]  # the commit that it was built from
    parts = [*_texts(source, headers), *options, *of_torch, *machine]
    return f"{source.stem}-{xxhash.xxh3_128_hexdigest(chr(10).join(parts).encode())}"


def _ready_or_built(key: str, archs: Sequence[int], build: Callable[[], Path]) -> Path:
    """Return the library of the folder that is named, else of `build`, or without a compiler of the cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    try:
        if named and (library := _ready(Path(named), key, archs)):
            return library
    except OSError as error:
        raise BuildError(f"the libraries of {FOLDER_VARIABLE} are not used: {error}") from None
    try:
        return build()
    except BuildError as error:
        with suppress(OSError, BuildError):
            if library := _ready(_cache_folder(), key, archs):
                return library
        raise BuildError(
            f"{error}, nor is its library in {named} ({FOLDER_VARIABLE})" if named else str(error)
        ) from None


def _ready(folder: Path, key: str, archs: Sequence[int]) -> Path | None:
    """Return a trusted library of a folder that fits, whichever compiler made it; None: there is none.

    Raises:
        OSError: the folder cannot be read, or others could put something into it.
    """
    refuse_shared(folder)
    for library in sorted(folder.glob(f"{key}-*.so")):
        made_for = {word for word in library.stem.split("-") if word.startswith("sm")}
        if {f"sm{arch}" for arch in archs} <= made_for and is_sealed(library):
            return library
    return None


def _said(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from None


def _numbers(name: str) -> tuple[int, ...]:
    """Return the version in a folder's name: (13, 0) of cuda-13.0."""
    return tuple(int(part) for part in name.removeprefix("cuda").strip("-").split(".") if part.isdigit())


def _texts(source: Path, headers: Sequence[Path]) -> list[str]:
    """Return the text of the source and of each of its headers."""
    own = source.with_suffix("").glob("*.*h")
    return [path.read_text(encoding="utf-8") for path in (source, *sorted(own), *sorted(headers))]


def _cache_folder() -> Path:
    if (folder := cache_folder()) is None:
        raise BuildError("there is no home folder for the kernel cache; set XDG_CACHE_HOME")
    return folder


def _reason(failed: Path) -> str:
    """Return why the compiler failed, as another process has put it down."""
    return read_file(failed, _REASON_BYTES, follow=False).decode(errors="replace")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(os.open(path, _LOCK_FLAGS, 0o600), "w") as lock:
        # Released when the file closes, also when this process dies.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with doing("waiting for another process that compiles the kernels"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(source: Path, command: Sequence[str], libraries: Sequence[str], library: Path, failed: Path) -> None:
    _LOG.info("compiling %s (%s)", source.name, library.name)
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    try:
        code, said = compile_with([*command, str(source), *libraries, "-o", str(unfinished)], unfinished)
        if code:
            errors = [line for line in said.splitlines() if "error" in line or "spill" in line] or ["no message"]
            reason = f"{command[0]} failed on {source.name}: {errors[0][:200]}"
            with suppress(OSError):  # a full disk: the others will see for themselves
                failed.write_text(reason, encoding="utf-8")
            raise BuildError(reason)
        if said:
            library.with_suffix(".log").write_text(said, encoding="utf-8")
        flush_file(unfinished)  # a power cut must not leave a name without its content
        seal(unfinished, library)
        failed.unlink(missing_ok=True)
    finally:
        unfinished.unlink(missing_ok=True)
