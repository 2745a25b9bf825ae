"""Make a folder to carry to a machine without network access, and install from it there.

    python -m scripts.gpu_check.carry              fetches wheels and makes token files: build/carried, under 40 MB
    python -m scripts.gpu_check.carry --install    prints the folder for PYTHONPATH, or nothing if nothing is missing

The wheels are for Python 3.12 on x86-64 Linux, in the versions of the lock file. They are unpacked into a folder next
to them, which does not change the machine's Python and needs no pip. The token files hold this repository's sources,
one token per byte. `--install` needs only the standard library.
"""

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "build" / "carried"
LOCK = ROOT / "locks" / "linux-x86_64-py3.12.txt"
LOCKED = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "ruamel-yaml")
PEERS = ("liger-kernel==0.8.5",)  # systems to compare with; not in the lock
PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64")
RUNS = "Python 3.12 on Linux x86_64"
MOST = 40e6  # largest size of the folder, in bytes
TEXT = 3_000_000  # size of the text, in bytes, about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true")
    if parser.parse_args().install:
        print(install(CARRIED))
        return 0
    shutil.rmtree(CARRIED, ignore_errors=True)
    fetch(CARRIED / "wheels")
    tokens(CARRIED)
    files = [path for path in CARRIED.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{CARRIED.relative_to(ROOT)}: {len(files)} files, {size / 1e6:.1f} MB")
    return 0 if size < MOST else 1


def fetch(wheels: Path) -> None:
    """Download the wheels to a folder."""
    lines = [line.split(" ")[0] for line in LOCK.read_text().splitlines()]
    wanted = [line for line in lines if line.partition("==")[0] in LOCKED]
    where = [word for each in PLATFORMS for word in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *where]
    subprocess.run([*command, "--python-version", "3.12", "--dest", str(wheels), *wanted, *PEERS], check=True)


def install(carried: Path) -> str:
    """Unpack all wheels into a folder next to them if a package is missing; return the folder, or "".

    Unpack even those that are installed: mixed versions may be incompatible. On another Python or system return "":
    the parts that need the packages then fail, and the others run.
    """
    wheels = sorted((carried / "wheels").glob("*.whl"))
    if not any(_is_missing(wheel.name.split("-")[0]) for wheel in wheels):
        return ""
    found = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.system()} {platform.machine()}"
    if found != RUNS:
        print(f"the carried wheels are of {RUNS}, this is {found}", file=sys.stderr)
        return ""
    target = carried / "installed"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return str(target)


def _is_missing(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def tokens(folder: Path) -> Path:
    """Make token files of this repository's sources if they do not exist; return their path without suffix."""
    prefix, text = folder / "train", folder / "text.jsonl"
    if not prefix.with_suffix(".idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with text.open("w", encoding="utf-8") as out:
            for path in sorted((ROOT / "megazero").rglob("*.py")):
                if out.tell() < TEXT:
                    out.write(json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n")
        words = ["--input", str(text), "--tokenizer", "bytes", "--output", str(prefix), "--workers", "1"]
        subprocess.run([sys.executable, "-m", "data_tools.preprocess", *words], cwd=ROOT, check=True)
        text.unlink()
    return prefix


if __name__ == "__main__":
    sys.exit(main())
