"""Writes the locks: every package that `make setup` installs, one version everywhere, with the hashes of its files.

    python scripts/lock.py                      after a change of pyproject.toml: versions stay where they can
    python scripts/lock.py --upgrade            takes the newest of everything
    python scripts/lock.py --upgrade numpy      takes the newest of some
    python scripts/lock.py --wheels FOLDER      admits wheels of one's own builds of the locked versions too

uv (`pip install uv`) resolves pyproject.toml for each platform and Python from the package index; here every package's
hashes are written down. Source archives are admitted only of packages that have no wheel. A hash that has been admitted
stays as long as its version does, so those of --wheels have to be given once a version.
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


def own_wheels(folder: Path | None, platform: str, python: str) -> list[tuple[str, str, str]]:
    """Return name, public version and sha256 of the wheels of a folder that fit a platform and a Python."""
    found, machine = [], platform.partition("-")[2]
    for path in sorted(folder.glob("*.whl")) if folder else ():
        name, version, _, tags = parse_wheel_filename(path.name)
        interpreters = {f"cp{python.replace('.', '')}", "py3"}
        system = "macosx" if platform.startswith("macos") else "manylinux"
        if any(
            tag.interpreter in interpreters
            and (tag.platform == "any" or (tag.platform.startswith(system) and tag.platform.endswith(machine)))
            for tag in tags
        ):
            found.append((name, version.public, hashlib.sha256(path.read_bytes()).hexdigest()))
    return found


def write(lock: Path, packages: Mapping[str, Package], own: Iterable[tuple[str, str, str]]) -> None:
    """Write a lock; no file where there are no packages."""
    admitted = {}
    for line in lines_of(lock).values() if lock.exists() else ():
        pinned, *options = line.split(" --hash=sha256:")
        admitted[pinned] = set(options)
    lines = ["# Written by scripts/lock.py, installed by `make setup` (scripts/install.py)."]
    for name, package in sorted(packages.items()):
        pinned = f"{name}=={package['version']}"
        digests = hashes(package) | admitted.get(pinned, set())
        digests |= {digest for *pin, digest in own if "==".join(pin) == pinned}
        lines.append(" ".join([pinned, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]))
    if packages:
        lock.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write every lock, each with the versions of those before it."""
    parser = argparse.ArgumentParser(description="Writes the locks that `make setup` installs from.")
    parser.add_argument("--upgrade", nargs="*", metavar="NAME", help="the newest version of these, or of all")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of one's own to admit too")
    options = parser.parse_args()
    pins: dict[str, str] = {}
    if options.upgrade != []:
        for path in LOCKS.glob("*.txt"):
            pins |= {name: line.split(" ")[0].partition("==")[2] for name, line in lines_of(path).items()}
    for name in options.upgrade or ():
        pins.pop(canonicalize_name(name), None)
    LOCKS.mkdir(exist_ok=True)
    for platform in PLATFORMS:
        for python in PYTHONS:
            own = own_wheels(options.wheels, platform, python)
            base = resolve(platform, python, ["test"], pins)
            pins |= {name: str(package["version"]) for name, package in base.items()}
            more = resolve(platform, python, ["test", "bench"], pins)
            pins |= {name: str(package["version"]) for name, package in more.items()}
            stem = f"{platform}-py{python}"
            cuda = {name: package for name, package in base.items() if CUDA.match(name)}
            write(LOCKS / f"{stem}.txt", {name: base[name] for name in base.keys() - cuda.keys()}, own)
            write(LOCKS / f"{stem}-cuda.txt", cuda, own)
            write(LOCKS / f"{stem}-bench.txt", {name: more[name] for name in more.keys() - base.keys()}, own)
            print(f"{stem}: {len(more)} packages", flush=True)


if __name__ == "__main__":
    main()
