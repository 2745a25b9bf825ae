"""Build a shared library from C++ or CUDA sources, once per machine.

The library's name contains a hash of its sources, flags, torch version and machine, so a stale one is never loaded and
nothing needs cleaning. The paths of torch and the compiler are not in the hash: two environments with the same torch
share one library. The library contains no path to torch's libraries either; these are loaded before it, found by name.

Libraries are stored in the user's cache folder (XDG_CACHE_HOME, else ~/.cache). The folder in MEGAZERO_KERNELS is
searched first: there or in the cache, a machine without a compiler finds a library that another machine has built.

The SHA-256 of a library's content is stored next to it. Without this check, a library truncated by a full disk or an
unfinished copy would end the process by SIGBUS when it is mapped.

Many ranks may start at once: one compiles under a file lock while the others wait. torch.utils.cpp_extension could
compile too, but it needs ninja, and a killed process leaves its lock behind for ever.
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
# The oldest torch whose stable ABI has all functions that the sources use (parallel_for): 2.10.
_TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-ltorch_cpu", "-lc10"]
_TORCH_FOLDERS = [f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}"]
_CPU_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"]
# The CUDA runtime is linked statically, so that the library also loads on a machine without CUDA.
_CUDA_FLAGS = ["-O3", "-std=c++20", "-Xcompiler=-fPIC", "-shared", "-cudart=static", "-Xptxas=-v,-warn-spills"]
# The byte counts of kernels do not include the memory traffic of spilled registers.
_NO_SPILLS = "-Xptxas=-Werror"
# The current stream comes from torch's CUDA library through a weak symbol. It resolves only if our library lists that
# one as needed: Python loads torch's libraries with local symbols, and a linker drops libraries that are only weakly
# needed. A torch without CUDA has no such library, and the symbol is never used.
_CUDA_NEEDS = "-Xlinker=--no-as-needed," + (
    "-ltorch_cuda" if (_TORCH / "lib" / "libtorch_cuda.so").exists() else "-ltorch"
)


class BuildError(RuntimeError):
    """The error of a missing or failed compiler; the text is one line."""


def build_cpu(source: Path) -> Path:
    """Return the shared library of a C++ source; compile it with g++ unless it was built before.

    Args:
        source: may include headers only from the folder of the same name next to it.

    Raises:
        BuildError: it was not built before, and there is no compiler, it failed, or the cache cannot be written.
    """
    return build_library(source, find_gcc, [*_CPU_FLAGS, *_TORCH_FLAGS], folders=_TORCH_FOLDERS)


def build_cuda(source: Path, archs: Sequence[int], *, spills: bool = False) -> Path:
    """Return the shared library of a CUDA source; compile it with nvcc unless it was built before.

    Args:
        source: may include headers only from the folder of the same name next to it.
        archs: compute capabilities, 90 for 9.0.
        spills: accept kernels that spill registers. Runs do: with an untested compiler or GPU, one slow kernel is
            better than no kernels.

    Raises:
        BuildError: as `build_cpu`; also if the compiler does not know one of `archs`, or a kernel spills.
    """
    options = [*_CUDA_FLAGS, *([] if spills else [_NO_SPILLS]), *_TORCH_FLAGS, _CUDA_NEEDS]
    return build_library(source, find_nvcc, options, folders=_TORCH_FOLDERS, archs=archs)


def build_library(
    source: Path,
    find_compiler: Callable[[], str],
    options: Sequence[str],
    *,
    folders: Sequence[str] = (),
    archs: Sequence[int] = (),
) -> Path:
    """Return the shared library of a source; run the compiler unless it was built before.

    Args:
        find_compiler: returns the path of the compiler; raises BuildError if there is none.
        options: of the compiler, including the libraries to link; hashed into the library's name.
        folders: options with folders of torch, which are not hashed into the library's name.
        archs: compute capabilities to compile for; an existing library for more of them is accepted.

    Raises:
        BuildError: as `build_cpu`.
    """
    name, targets = _name(source, options), [f"sm{arch}" for arch in sorted(archs)]
    places = [Path(named)] if (named := os.environ.get(FOLDER_VARIABLE)) else []
    places.append(cache_folder())
    if library := _built_before(places, name, targets):
        return library
    try:
        compiler = find_compiler()
    except BuildError as error:
        raise BuildError(f"{error}, and no built library in {' or '.join(map(str, places))}") from None
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
    """Return the path of g++; raise BuildError if there is none."""
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
    except OSError as error:  # for example, a cache on a file system mounted noexec
        raise BuildError(f"{library} cannot be loaded: {error.__cause__ or error}") from None


def compiler_report(library: Path) -> str:
    """Return the compiler's messages about `library`; raise FileNotFoundError if it had none."""
    return library.with_suffix(".log").read_text(encoding="utf-8")


def _name(source: Path, options: Sequence[str]) -> str:
    """Return the name of a library, with a hash of everything that determines its code."""
    machine = [platform.machine(), *platform.libc_ver()]  # different machines may share a home folder
    of_torch = [torch.__version__, str(torch.version.git_version)]
    files = [source, *sorted(source.with_suffix("").glob("*.*h"))]
    parts = [*(path.read_text(encoding="utf-8") for path in files), *options, *of_torch, *machine]
    return f"{source.stem}-{xxhash.xxh3_128_hexdigest(chr(10).join(parts).encode())}"


def cache_folder() -> Path:
    """Return the folder for built libraries and verdicts; raise BuildError if this user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazero"
    except RuntimeError:  # no HOME, and a user without an entry in the password file
        raise BuildError("there is no home folder for the kernel cache; set XDG_CACHE_HOME") from None


def _built_before(places: Sequence[Path], name: str, targets: Sequence[str]) -> Path | None:
    """Return the first intact library of a name that was built for all targets; None if there is none."""
    for library in (path for folder in places for path in sorted(folder.glob(f"{name}*.so"))):
        if set(targets) <= set(library.stem.split("-")) and _is_sealed(library):
            return library
    return None


def _compile(command: Sequence[str], library: Path) -> None:
    """Run a compiler in a temporary folder; move its output to the library's path when it is complete."""
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
    """Run a compiler; return its exit code and messages. On an exception, end it and its child processes."""
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
    """Write the hash of a finished library next to its path, then move the library there. Raises OSError.

    The hash is written first: if the process is killed in between, no library matches it, and it is built again.
    """
    flush_file(unfinished)
    replace_file(library.with_suffix(".sha256"), _digest(unfinished))
    unfinished.replace(library)


def _is_sealed(library: Path) -> bool:
    """Return True if a library's content matches its stored hash."""
    try:
        return library.with_suffix(".sha256").read_bytes() == _digest(library)
    except OSError:
        return False


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().encode()
