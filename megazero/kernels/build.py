"""Build a shared library of C++ or CUDA sources, once per machine.

The library's name carries a hash of its sources, flags, torch and machine, so that a stale one is never loaded and
nothing needs cleaning. Where torch and the compiler lie is no part of the hash: two environments with the same torch
share one library. Nor does the library carry a path to torch's libraries, which are loaded before it and found by name.

Libraries lie in the user's cache folder (XDG_CACHE_HOME, else ~/.cache). The folder that MEGAZERO_KERNELS names comes
first: a machine without a compiler takes from there, or from the cache, a library that another machine has built.

The SHA-256 of a library's content is next to it. A library that was cut off, by a full disk or an unfinished copy,
would otherwise end the process by SIGBUS when it is mapped.

Many ranks may start at once: one compiles under a file lock while the others wait. torch.utils.cpp_extension would also
compile, but it needs ninja, and a killed process leaves its lock for ever.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import xxhash

from megazero.base.doing import doing
from megazero.base.files import flush_file, replace_file

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


class BuildError(RuntimeError):
    """The error that there is no compiler, or that it failed; the text is one line."""


def build_cpu(source: Path) -> Path:
    """Return the shared library of a C++ source; compile it with g++ unless it was built before.

    Args:
        source: may include headers from the folder next to it that has its name, and no others of ours.

    Raises:
        BuildError: it was not built before, and there is no compiler, it failed, or the cache cannot be written.
    """
    return build_library(source, find_gcc, [*_CPU_FLAGS, *_TORCH_FLAGS], folders=_TORCH_FOLDERS)


def build_cuda(source: Path, archs: Sequence[int], *, spills: bool = False) -> Path:
    """Return the shared library of a CUDA source; compile it with nvcc unless it was built before.

    Args:
        source: may include headers from the folder next to it that has its name, and no others of ours.
        archs: compute capabilities, 90 for 9.0.
        spills: accept a kernel that spills registers. A run does: with an untested compiler or GPU, one slow kernel is
            better than none.

    Raises:
        BuildError: as `build_cpu` does; also where the compiler does not know one of `archs`, or a kernel spills.
    """
    options = [*_CUDA_FLAGS, *([] if spills else [_NO_SPILLS]), *_TORCH_FLAGS, _CUDA_NEEDS]
    return build_library(source, find_nvcc, options, folders=_TORCH_FOLDERS, archs=archs)


def build_library(
    source: Path,
    find_compiler: Callable[[], str],
    options: Sequence[str],
    *,
    headers: Sequence[Path] = (),
    folders: Sequence[str] = (),
    archs: Sequence[int] = (),
) -> Path:
    """Return the shared library that a compiler makes of a source; run the compiler unless it was built before.

    Args:
        find_compiler: returns the path of the compiler; raises BuildError where there is none.
        options: of the compiler, libraries to link included.
        headers: files that the source includes, besides those in the folder that has its name.
        folders: options that name folders of torch, and so are no part of the library's name.
        archs: compute capabilities to compile for; a library that was built for more of them will do.

    Raises:
        BuildError: as `build_cpu` does.
    """
    name, targets = _name(source, headers, options), [f"sm{arch}" for arch in sorted(archs)]
    places = [Path(named)] if (named := os.environ.get(FOLDER_VARIABLE)) else []
    places.append(_cache_folder())
    if library := _built_before(places, name, targets):
        return library
    try:
        compiler = find_compiler()
    except BuildError as error:
        raise BuildError(f"{error}, nor is its library in {' or '.join(map(str, places))}") from None
    library = places[-1] / ("-".join([name, *targets]) + ".so")
    generate = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in sorted(archs)]
    command = [compiler, str(source), *generate, *options, *folders]
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with library.with_suffix(".lock").open("w") as lock, doing(f"compiling {source.name}"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also when this process is killed
            if not _is_sealed(library):  # another process may have built it in the meantime
                _compile(command, library)
    except OSError as error:
        raise BuildError(f"the kernel cache {library.parent} cannot be used: {error}") from None
    return library


def find_gcc() -> str:
    """Return the path of g++; raise BuildError where there is none."""
    if (compiler := shutil.which("g++")) is None:
        raise BuildError("no g++ on this machine")
    return compiler


def find_nvcc() -> str:
    """Return the path of nvcc: in CUDA_HOME if that is set, else on the PATH or in /usr/local/cuda.

    Raises:
        BuildError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    folders = f"{home}/bin" if home else f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"
    if (compiler := shutil.which("nvcc", path=folders)) is None:
        raise BuildError(f"no nvcc in {home}/bin (CUDA_HOME)" if home else "no nvcc on the PATH or in /usr/local/cuda")
    return compiler


@cache
def open_library(library: Path) -> None:
    """Load the operations of a library into torch; raise BuildError if it cannot be loaded."""
    try:
        torch.ops.load_library(library)
    except OSError as error:  # a cache on a file system that forbids execution, say
        raise BuildError(f"{library} cannot be loaded: {error.__cause__ or error}") from None


def compiler_report(library: Path) -> str:
    """Return the compiler's messages about `library`; raise FileNotFoundError if it had none."""
    return library.with_suffix(".log").read_text(encoding="utf-8")


def _name(source: Path, headers: Sequence[Path], options: Sequence[str]) -> str:
    """Return the name of a library, with a hash of all that decides its code."""
    machine = [platform.machine(), *platform.libc_ver()]  # a home folder may be shared by unlike machines
    of_torch = [torch.__version__, str(torch.version.git_version)]
    files = [source, *sorted(source.with_suffix("").glob("*.*h")), *sorted(headers)]
    parts = [*(path.read_text(encoding="utf-8") for path in files), *options, *of_torch, *machine]
    return f"{source.stem}-{xxhash.xxh3_128_hexdigest(chr(10).join(parts).encode())}"


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazero"
    except RuntimeError:  # no HOME, and a user without an entry in the password file
        raise BuildError("there is no home folder for the kernel cache; set XDG_CACHE_HOME") from None


def _built_before(places: Sequence[Path], name: str, targets: Sequence[str]) -> Path | None:
    """Return the first whole library of a name that was built for all targets; None: there is none."""
    for library in (path for folder in places for path in sorted(folder.glob(f"{name}*.so"))):
        if set(targets) <= set(library.stem.split("-")) and _is_sealed(library):
            return library
    return None


def _compile(command: Sequence[str], library: Path) -> None:
    """Run a compiler, and give its output the library's name once it is whole."""
    _LOG.info("compiling %s", library.name)
    with TemporaryDirectory(dir=library.parent, prefix="compiling-") as folder:
        made = Path(folder) / library.name
        code, said = _run([*command, "-o", str(made)])
        if code:
            lines = [line for line in said.splitlines() if any(word in line for word in ("error", "fatal", "spill"))]
            raise BuildError(f"{command[0]} failed on {Path(command[1]).name}: {(lines or ['no message'])[0][:200]}")
        if said:
            library.with_suffix(".log").write_text(said, encoding="utf-8")
        _seal(made, library)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a compiler; return its exit code and its messages. An exception ends it with all that it has started."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0
    ) as compiler:
        try:
            said = compiler.communicate()[0]
        except BaseException:
            os.killpg(compiler.pid, signal.SIGTERM)
            raise
    return compiler.returncode, said


def _seal(unfinished: Path, library: Path) -> None:
    """Give a finished library its name, with the hash of its content next to it. Raises OSError.

    The hash comes first: a process that is killed in between leaves no hash that fits, and the library is built again.
    """
    flush_file(unfinished)
    replace_file(library.with_suffix(".sha256"), _digest(unfinished))
    unfinished.replace(library)


def _is_sealed(library: Path) -> bool:
    """Return True if a library has the content that was sealed."""
    try:
        return library.with_suffix(".sha256").read_bytes() == _digest(library)
    except OSError:
        return False


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().encode()
