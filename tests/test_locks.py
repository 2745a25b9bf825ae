"""The locks that `make setup` installs from: complete, of one version everywhere, and held against by pip."""

import base64
import hashlib
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.install import LOCKED, LOCKS, asks_for_any, install, install_locked, lines_of, this_machine
from scripts.lock import CUDA, EXTRAS, PLATFORMS, PYTHONS
from tests.tiny_run import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = PROJECT["project"]["optional-dependencies"]
BASES = [f"{platform}-py{python}" for platform in PLATFORMS for python in PYTHONS]
LINE = re.compile(r"[a-z0-9-]+==[a-z0-9.]+(\+cpu)?( --hash=sha256:[0-9a-f]{64})+")


def missing(requirements: list[str], locked: dict[str, str]) -> list[str]:
    """The requirements that no line of some locks satisfies."""
    found = []
    for requirement in map(Requirement, requirements):
        pin = locked.get(canonicalize_name(requirement.name), "==").split(" ")[0].partition("==")[2]
        if not pin or pin not in requirement.specifier:
            found.append(str(requirement))
    return found


@pytest.mark.parametrize("stem", BASES)
def test_what_the_project_asks_for_is_locked(stem: str) -> None:
    base = lines_of(LOCKS / f"{stem}.txt")
    asked = PROJECT["project"]["dependencies"] + OPTIONAL["test"] + PROJECT["build-system"]["requires"]
    assert missing(asked, base) == []
    for extra in EXTRAS:
        assert missing(OPTIONAL[extra], lines_of(LOCKS / f"{stem}-{extra}.txt")) == []
    assert not any(CUDA.match(name) for name in base)
    assert (LOCKS / f"{stem}-cuda.txt").exists() == stem.startswith("linux")


@pytest.mark.parametrize("stem", BASES)
def test_only_packages_without_wheels_are_built(stem: str) -> None:
    """pip is asked for wheels only, but for the packages of one short lock."""
    base, source = lines_of(LOCKS / f"{stem}.txt"), lines_of(LOCKS / f"{stem}-source.txt")
    assert set(source) == {"rouge-score", "sqlitedict", "word2number"}  # needs of lm-eval
    assert not base.keys() & source.keys()


def test_what_is_missing_is_found() -> None:
    assert missing(["numpy>=2", "einops", "ruff<1"], {"numpy": "numpy==1.26", "ruff": "ruff==0.1 --hash"}) == [
        "numpy>=2",
        "einops",
    ]


def test_every_line_is_a_version_with_hashes_and_nothing_else() -> None:
    paths = sorted(LOCKS.iterdir())
    extras = ("", "-source", "-cuda", "-cpu", *(f"-{extra}" for extra in EXTRAS))
    assert {path.name for path in paths} <= {f"{stem}{extra}.txt" for stem in BASES for extra in extras}
    for path in paths:
        comment, *lines = path.read_text().splitlines()
        assert comment.startswith("# ") and "//" not in comment  # the name of no host
        assert lines and [line for line in lines if not LINE.fullmatch(line)] == [], path
        assert len(lines_of(path)) == len(lines), path


def test_one_version_everywhere() -> None:
    versions: dict[str, set[str]] = {}
    for path in LOCKS.iterdir():
        for name, line in lines_of(path).items():
            versions.setdefault(name, set()).add(line.split(" ")[0].removesuffix("+cpu"))
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_nothing_is_locked_twice_for_one_machine() -> None:
    for stem in BASES:
        paths = [path for path in LOCKS.glob(f"{stem}*.txt") if not path.stem.endswith("-cpu")]
        names = [name for path in paths for name in lines_of(path)]
        assert len(names) == len(set(names)), stem


def wheel(folder: Path, content: str) -> Path:
    """A wheel with one module."""
    info = "locked_thing-1.0.dist-info"
    files = {
        "locked_thing.py": content,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: locked-thing\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{info}/RECORD,,"]
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(text)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "locked_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in (files | {f"{info}/RECORD": "\n".join(rows)}).items():
            file.writestr(name, text)
    return path


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As scripts/install.py calls it, but from a folder instead of an index."""
    honest = wheel(tmp_path / "wheels", "value = 1\n")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"locked-thing==1.0 --hash=sha256:{hashlib.sha256(honest.read_bytes()).hexdigest()}\n")

    def install_into(target: str) -> None:
        offline = ("--isolated", "--no-index", f"--find-links={honest.parent}", f"--target={tmp_path / target}")
        install_locked(lock, "--only-binary=:all:", *offline)

    install_into("first")
    assert (tmp_path / "first/locked_thing.py").read_text() == "value = 1\n"
    wheel(honest.parent, "value = 2\n")
    with pytest.raises(SystemExit, match="pip install failed"):
        install_into("second")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not (tmp_path / "second").exists()


def test_an_extra_without_a_lock_is_said_before_anything_is_installed() -> None:
    with pytest.raises(SystemExit, match=f"no lock {this_machine()}-nothing; there are linux-aarch64-py3.11, "):
        install(LOCKED, ["nothing"])


def test_what_asks_for_cuda() -> None:
    assert asks_for_any("tensorboard", ["nvidia-nccl-cu13", "markdown"])
    assert not asks_for_any("tensorboard", ["nvidia-nccl-cu13", "triton"])
