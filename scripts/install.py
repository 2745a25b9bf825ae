"""Install what the project needs into the environment of the Python that runs this; `make setup` calls it.

Every package comes from the lock of this platform and Python, which names one version and the hashes of its files; pip
refuses a file with another hash. pip resolves nothing, so it installs only packages that a lock names; `pip check` at
the end shows that no package is missing. scripts/lock.py writes the locks, in the folder locks:

    PLATFORM-pyVERSION.txt          the project's and its tests' requirements, setuptools for the installation, torch
    PLATFORM-pyVERSION-source.txt   packages without wheels, which are built here
    PLATFORM-pyVERSION-cuda.txt     additional requirements of a torch for CUDA
    PLATFORM-pyVERSION-cpu.txt      a build of torch for the CPU, used instead if pip is configured to find it
    PLATFORM-pyVERSION-bench.txt    the peers of the benchmarks
    PLATFORM-pyVERSION-docs.txt     the tools with which `make docs` builds the site

This script needs only the standard library and megazero's heartbeat, which shows progress while pip is silent for
minutes.
"""

import argparse
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":  # as a script: import megazero from the repository
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from megazero.base.doing import doing
from megazero.base.heartbeat import HEART

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
LOCKED = "locked"  # the value of --torch that selects torch from the lock


def this_machine() -> str:
    """Return the prefix of the names of this machine's locks: PLATFORM-pyVERSION."""
    system = {"Darwin": "macos"}.get(platform.system(), platform.system().lower())
    return f"{system}-{platform.machine()}-py{sys.version_info.major}.{sys.version_info.minor}"


def lines_of(lock: Path) -> dict[str, str]:
    """Return the lines of a lock by normalised package name."""
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    return {line.partition("==")[0]: line for line in lines}


def asks_for_any(package: str, names: Sequence[str]) -> bool:
    """Return whether an installed package depends on one of these packages."""
    required = [re.match(r"[\w.-]+", line) for line in metadata.requires(package) or ()]
    return not {re.sub(r"[-_.]+", "-", name[0]).lower() for name in required if name}.isdisjoint(names)


def pip(*options: str | Path) -> None:
    """Run pip; exit if it fails, as pip has printed the reason."""
    with doing(f"pip {options[0]}"):
        done = subprocess.run([sys.executable, "-m", "pip", *map(str, options)], check=False)
    if done.returncode:
        sys.exit(f"pip {options[0]} failed")


def install_locked(lock: Path, *options: str) -> None:
    """Install exactly the packages of a lock."""
    pip("install", "--quiet", "--require-hashes", "--no-deps", *options, "-r", lock)


def is_found(lock: Path) -> bool:
    """Return whether pip, as configured, finds the packages of a lock; exit on a wrong hash.

    Both builds of a version cannot be in one lock: pip prefers a file whose hash an index states.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--require-hashes", "--no-deps", "-r"]
    with doing("looking for a build of torch for the CPU"):
        done = subprocess.run([*command, str(lock)], capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" not in done.stderr:
        sys.exit(done.stderr)
    return done.returncode == 0


def install(torch: str, extras: Sequence[str]) -> None:
    """Install the project on this machine.

    Args:
        torch: LOCKED, or a requirement and options of pip that install torch instead.
        extras: extras of pyproject.toml other than `test`; each has its own lock.
    """
    machine = this_machine()
    names = ("", "-cuda", "-cpu", "-source", *(f"-{name}" for name in extras))
    base, cuda, cpu, source, *others = [LOCKS / f"{machine}{name}.txt" for name in names]
    for lock in (base, *others):
        if not lock.exists():
            parts = ("-cuda", "-cpu", "-source")
            there = ", ".join(sorted(path.stem for path in LOCKS.glob("*.txt") if not path.stem.endswith(parts)))
            sys.exit(f"no lock {lock.stem}; there are {there}. Another Python: make setup PYTHON=python3.12")
    lines = lines_of(base)
    if torch != LOCKED:
        print(f"not locked, at your request: {torch} and what it brings; the other packages are", flush=True)
        del lines["torch"]
    elif cpu.exists() and is_found(cpu):
        lines |= lines_of(cpu)
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder) / base.name
        chosen.write_text("\n".join(lines.values()))
        install_locked(chosen, "--only-binary=:all:")
    if torch != LOCKED:
        pip("install", "--quiet", *shlex.split(torch))
    elif cuda.exists() and asks_for_any("torch", list(lines_of(cuda))):
        install_locked(cuda, "--only-binary=:all:")
    for lock in [source] * source.exists() + others:
        # Packages without wheels, DeepSpeed too, are built with those of this environment, which are locked too.
        install_locked(lock, "--no-build-isolation")
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    pip("check")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Installs what the project needs into this Python's environment.")
    parser.add_argument("--torch", default=LOCKED, help='"locked", or a requirement and options for pip')
    parser.add_argument("--environment", type=Path, help="only make this virtual environment")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras to install: bench, docs")
    options = parser.parse_args()
    HEART.begin(sys.stdout, "install.py")
    if options.environment is not None:
        with doing(f"making {options.environment}"):
            done = subprocess.run([sys.executable, "-m", "venv", options.environment], check=False)
        sys.exit(done.returncode)
    install(options.torch, options.extras)


if __name__ == "__main__":
    main()
