"""Write the locks: all packages that `make setup` installs, each in one version everywhere, with its files' hashes.

    python scripts/lock.py                      after a change of pyproject.toml: keeps the locked versions
    python scripts/lock.py --upgrade            takes the newest versions of all packages
    python scripts/lock.py --upgrade numpy      takes the newest versions of some packages
    python scripts/lock.py --wheels FOLDER      also locks the CPU builds of torch (2.13.0+cpu) in a folder

uv (`pip install uv`) resolves pyproject.toml for each platform and Python from the package index; this script writes
the versions and hashes. A source archive is locked only if a package has no wheel, and in a lock of its own. Without
--wheels the locks of CPU builds are kept as long as the version of torch does not change, and deleted when it does.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: from the repository
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import hashlib
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename

from scripts.install import LOCKS, ROOT, lines_of

EXTRAS = ("bench", "docs")  # extras of pyproject.toml; each has its own lock
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {  # our name -> uv's name
    "linux-x86_64": "x86_64-manylinux_2_28",
    "linux-aarch64": "aarch64-manylinux_2_28",
    "macos-arm64": "aarch64-apple-darwin",
}
OLDEST_MACOS = "14.0"  # for which torch has wheels
CUDA = re.compile(r"(nvidia|cuda|triton)\b")  # requirements of torch for GPUs only

Package = Mapping[str, Any]  # a table of the pylock.toml standard


def resolve(platform: str, python: str, extras: Iterable[str], pins: Mapping[str, str]) -> dict[str, Package]:
    """Resolve the requirements with uv; return the packages by name (from a pylock.toml, PEP 751).

    Args:
        pins: versions to keep.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        build, kept = Path(folder) / "build.txt", Path(folder) / "kept.txt"
        build.write_text("\n".join(project["build-system"]["requires"]))
        kept.write_text("\n".join(f"{name}=={version}" for name, version in pins.items()))
        command = ["env", f"MACOSX_DEPLOYMENT_TARGET={OLDEST_MACOS}", "uv", "pip", "compile", "--quiet"]
        command += ["--format", "pylock.toml", "--python-version", python, "--python-platform", PLATFORMS[platform]]
        command += [option for extra in extras for option in ("--extra", extra)]
        command += ["--constraint", str(kept), "pyproject.toml", str(build)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"no versions for {platform} and Python {python}: see above; perhaps --upgrade NAME")
    return {package["name"]: package for package in tomllib.loads(done.stdout)["packages"]}


def hashes(package: Package) -> set[str]:
    """Return the sha256 of a package's wheels, or of its source archive if it has none."""
    return {file["hashes"]["sha256"] for file in package.get("wheels") or [package["sdist"]]}


def cpu_builds(folder: Path, platform: str, python: str) -> dict[str, str]:
    """Return the lock lines, by name, of the CPU builds of torch in a folder for a platform and a Python."""
    machine, interpreter = platform.partition("-")[2], f"cp{python.replace('.', '')}"
    found = {}
    for path in sorted(folder.glob("torch-*+cpu-*.whl")):
        name, version, _, tags = parse_wheel_filename(path.name)
        if any(
            tag.interpreter == interpreter and re.fullmatch(rf"manylinux.*_{machine}", tag.platform) for tag in tags
        ):
            found[name] = f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return found


def write(lock: Path, lines: Mapping[str, str]) -> None:
    """Write a lock; delete it if there are no packages."""
    lock.unlink(missing_ok=True)
    if lines:
        comment = "# Written by scripts/lock.py, installed by `make setup` (scripts/install.py)."
        lock.write_text("\n".join([comment, *(lines[name] for name in sorted(lines))]) + "\n")


def lines(packages: Mapping[str, Package]) -> dict[str, str]:
    """Return the lock line of each package by name."""
    return {
        name: " ".join([f"{name}=={package['version']}", *(f"--hash=sha256:{d}" for d in sorted(hashes(package)))])
        for name, package in packages.items()
    }


def main() -> None:
    """Write all locks; each keeps the versions of the previous ones."""
    parser = argparse.ArgumentParser(description="Writes the locks that `make setup` installs from.")
    parser.add_argument("--upgrade", nargs="*", metavar="NAME", help="upgrade these packages, or all")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="folder with CPU builds of torch")
    options = parser.parse_args()
    pins: dict[str, str] = {}
    if options.upgrade != []:
        for path in LOCKS.glob("*.txt"):
            pins |= {name: re.split("==|[+ ]", line)[1] for name, line in lines_of(path).items()}
    for name in options.upgrade or ():
        pins.pop(canonicalize_name(name), None)
    LOCKS.mkdir(exist_ok=True)
    for platform in PLATFORMS:
        for python in PYTHONS:
            base = resolve(platform, python, ["test"], pins)
            pins |= {name: str(package["version"]) for name, package in base.items()}
            stem = f"{platform}-py{python}"
            cuda = {name: package for name, package in base.items() if CUDA.match(name)}
            source = {name: package for name, package in base.items() if not package.get("wheels")}
            wheels = {name: base[name] for name in base.keys() - cuda.keys() - source.keys()}
            write(LOCKS / f"{stem}.txt", lines(wheels))
            write(LOCKS / f"{stem}-source.txt", lines(source))
            write(LOCKS / f"{stem}-cuda.txt", lines(cuda))
            for extra in EXTRAS:
                more = resolve(platform, python, ["test", extra], pins)
                pins |= {name: str(package["version"]) for name, package in more.items()}
                write(LOCKS / f"{stem}-{extra}.txt", lines({name: more[name] for name in more.keys() - base.keys()}))
            cpu = LOCKS / f"{stem}-cpu.txt"
            builds = (
                cpu_builds(options.wheels, platform, python)
                if options.wheels
                else lines_of(cpu)
                if cpu.exists()
                else {}
            )
            of_torch = f"torch=={base['torch']['version']}+cpu "
            write(cpu, {name: line for name, line in builds.items() if line.startswith(of_torch)})
            print(f"{stem}: {len(base)} packages", flush=True)


if __name__ == "__main__":
    main()
