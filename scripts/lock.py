"""Write the locks: every package that `make setup` installs, one version everywhere, with the hashes of its files.

    python scripts/lock.py                      after a change of pyproject.toml: versions stay where they can
    python scripts/lock.py --upgrade            takes the newest of everything
    python scripts/lock.py --upgrade numpy      takes the newest of some
    python scripts/lock.py --wheels FOLDER      locks the CPU builds of torch (2.13.0+cpu) that are in a folder too

uv (`pip install uv`) resolves pyproject.toml for each platform and Python from the package index; here every package's
hashes are written down. Source archives are admitted only of packages that have no wheel. Without --wheels the locks of
CPU builds stay as they are while torch's version does, and go when it changes.
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

EXTRAS = ("bench", "docs")  # of pyproject.toml, each with a lock of its own
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {  # our name of it, uv's
    "linux-x86_64": "x86_64-manylinux_2_28",
    "linux-aarch64": "aarch64-manylinux_2_28",
    "macos-arm64": "aarch64-apple-darwin",
}
OLDEST_MACOS = "14.0"  # that torch has wheels for
CUDA = re.compile(r"(nvidia|cuda|triton)\b")  # what torch depends on for GPUs only

Package = Mapping[str, Any]  # a table of the pylock.toml standard


def resolve(platform: str, python: str, extras: Iterable[str], pins: Mapping[str, str]) -> dict[str, Package]:
    """Return uv's choice of packages by name (a pylock.toml, PEP 751).

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
    """Return the sha256 of the files that may be installed as a package."""
    return {file["hashes"]["sha256"] for file in package.get("wheels") or [package["sdist"]]}


def cpu_builds(folder: Path, platform: str, python: str) -> dict[str, str]:
    """Return the lines, by name, of the builds of torch for the CPU in a folder that fit a platform and a Python."""
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
    """Write a lock; no file where there are no packages."""
    lock.unlink(missing_ok=True)
    if lines:
        comment = "# Written by scripts/lock.py, installed by `make setup` (scripts/install.py)."
        lock.write_text("\n".join([comment, *(lines[name] for name in sorted(lines))]) + "\n")


def lines(packages: Mapping[str, Package]) -> dict[str, str]:
    """Return the line of each package."""
    return {
        name: " ".join([f"{name}=={package['version']}", *(f"--hash=sha256:{d}" for d in sorted(hashes(package)))])
        for name, package in packages.items()
    }


def main() -> None:
    """Write every lock, each with the versions of those before it."""
    parser = argparse.ArgumentParser(description="Writes the locks that `make setup` installs from.")
    parser.add_argument("--upgrade", nargs="*", metavar="NAME", help="the newest version of these, or of all")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="where CPU builds of torch are")
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
            write(LOCKS / f"{stem}.txt", lines({name: base[name] for name in base.keys() - cuda.keys()}))
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
