"""Packages, compilers and apex: what is there, and a line for each kind of what is not."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from megazero.base.packages import PACKAGES, Package
from megazero.tools.doctor import software
from megazero.tools.doctor.finding import Finding, examine
from megazero.tools.doctor.software import apex, cpp_compiler, cuda_compiler, packages
from tests.tiny_run import ROOT


def test_the_table_is_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {}
    for requirement in project["dependencies"]:
        name, _, least = requirement.partition(">=")
        asked[name] = tuple(int(number) for number in least.split(".") if number)
    assert {package.name: package.least for package in PACKAGES if package.name in asked} == asked
    needed = {package.name for package in PACKAGES if not package.use}
    assert needed == set(asked) - {"wandb"}, "wandb is imported only when it is asked for"
    extras = {re.split(r"[\[>]", name)[0] for extra in project["optional-dependencies"].values() for name in extra}
    assert {package.name for package in PACKAGES} - set(asked) <= extras


def test_packages_that_are_not_there_or_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "folder_only").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    table = (
        Package("torch", "torch", (2, 10)),
        Package("numpy", "numpy", (99, 1)),
        Package("no-such-thing", "no_such_thing"),
        Package("nor.this", "nor_that.this", use="nothing"),
        Package("folder-only", "folder_only", use="nothing"),
    )
    found = {finding.name: finding for finding in packages(table)}
    assert [finding.state for finding in found.values()] == ["missing", "missing", "absent", "absent", "there"]
    assert "expected numpy>=99.1" in found["numpy"].text and "pip install 'numpy>=99.1'" in found["numpy"].do
    assert found["no-such-thing"].text == "not installed" and "only for nothing" in found["nor.this"].text
    assert found["packages"].text.startswith("torch 2.")


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiler_that_works():
    (finding,) = cpp_compiler()
    assert finding.state == "there" and re.match(r"\d+\.\d+", finding.text)


def test_compilers_that_answer_and_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def both() -> list[Finding]:
        return [*examine("g++", cpp_compiler), *examine("nvcc", cuda_compiler)]

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    program(tmp_path / "bin", "g++", "echo 13.3.0")
    program(tmp_path / "bin", "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.1'")
    assert [finding.text for finding in both()] == ["13.3.0", "13.0"]
    program(tmp_path / "bin", "g++", "exec /bin/sleep 60")
    program(tmp_path / "bin", "nvcc", "exec /bin/sleep 60")
    monkeypatch.setattr(software, "_SECONDS", 0.2)
    assert all(found.state == "unknown" and found.text.startswith("TimeoutExpired") for found in both())


APEX = {
    "amp_C.py": "",
    "fused_layer_norm_cuda.py": "",
    "apex/__init__.py": "",
    "apex/optimizers.py": "class FusedAdam: ...",
    "apex/normalization.py": "class FusedLayerNorm: ...",
}


@pytest.mark.parametrize(
    ("files", "state", "text"),
    [
        ({}, "absent", "not installed"),
        ({"apex.py": ""}, "absent", "not installed, or another package of that name"),
        ({**APEX, "apex/optimizers.py": ""}, "absent", "without apex.optimizers.FusedAdam"),
        (APEX, "there", "NVIDIA's, with its CUDA extensions"),
    ],
    ids=["none", "another-project", "without-symbols", "there"],
)
def test_apex_by_its_symbols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], state, text):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    names = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in ("apex.py", *APEX)]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    (finding,) = apex()
    for name in names:
        sys.modules.pop(name, None)
    assert finding.state == state and finding.text.startswith(text)
