"""From C++ source to a shared library, once per machine: the only builder.

The library's name is a hash of everything it depends on (sources, flags, compiler, torch), so a stale one is never
loaded and nothing needs cleaning. Many ranks may start at once: one compiles under a file lock while the others wait,
and the finished library appears by a rename, so a half-written one is never loaded either. It lives in the user's
cache folder (XDG_CACHE_HOME, else ~/.cache).
"""

import fcntl
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch
import xxhash

from megazero.files import flush_file

_TORCH = Path(torch.__file__).parent
# The oldest torch whose stable ABI has what the sources use (parallel_for): 2.10.
_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the text is one line."""


def build_cpu(source: Path) -> Path:
    """The shared library of a C++ source, compiled with g++ unless that has been done before.

    Args:
        source: may include headers from the folder beside it that has its name, and no others of ours.

    Raises:
        BuildError: no compiler, it failed, or the cache folder cannot be written.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ on this machine")
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=False).stdout
    machine = [platform.machine(), *platform.libc_ver()]  # a home folder may be shared by unlike machines
    parts = [*_texts(source), *_FLAGS, compiler, version, torch.__version__, str(_TORCH), *machine]
    name = f"{source.stem}-{xxhash.xxh3_128_hexdigest(chr(10).join(parts).encode())}.so"
    folder = _cache_folder()
    library = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{library.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also when this process dies
            if not library.exists():
                _compile(compiler, source, library)
    except OSError as error:
        raise BuildError(f"the kernel cache {folder} cannot be used: {error}") from None
    return library


def _texts(source: Path) -> list[str]:
    """Of the source and of its headers."""
    headers = sorted(source.with_suffix("").glob("*.*h"))
    return [path.read_text(encoding="utf-8") for path in (source, *headers)]


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazero"
    except RuntimeError:  # no HOME, and a user without an entry in the password file
        raise BuildError("there is no home folder for the kernel cache; set XDG_CACHE_HOME") from None


def _compile(compiler: str, source: Path, library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *_FLAGS, f"-I{_TORCH / 'include'}", str(source)]
    command += [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH / 'lib'}", "-o", str(unfinished)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
            raise BuildError(f"{compiler} failed on {source.name}: {errors[0][:200]}")
        flush_file(unfinished)  # a power cut must not leave a name without its content
        unfinished.rename(library)
    finally:
        unfinished.unlink(missing_ok=True)
