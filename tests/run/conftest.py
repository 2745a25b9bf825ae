"""Fixtures of runs on several sources."""

import shutil
from pathlib import Path

import pytest

from tests.sources import cut
from tests.tiny_run import TinyData


@pytest.fixture(scope="module")
def paths(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three data sets by name."""
    return cut(tiny_data, tmp_path_factory.mktemp("sources"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a module's fixture `made` has trained, to go on from."""
    return Path(shutil.copytree(made, tmp_path / "run"))
