"""A small tokenizer, and the commands as a user runs them: in a process of their own."""

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from data_tools import train_tokenizer
from tests.quiet import without_heartbeat

REPOSITORY = Path(__file__).parent.parent.parent
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 pieces, trained on a module of the standard library."""
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    source = Path(sysconfig.get_path("stdlib"), "argparse.py")
    assert train_tokenizer.main(["--input", str(source), "--output", str(path), "--vocab", "400"]) == 0
    return path


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """command("merge", "a", "--output", "b") runs `python data_tools/merge.py a --output b` in tmp_path."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, REPOSITORY / f"data_tools/{name}.py", *map(str, arguments)]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
        done.stderr = without_heartbeat(done.stderr)
        return done

    return run


@pytest.fixture
def fails(command: Command) -> Callable[..., str]:
    """fails(exit code, MZ code, command, arguments ...) -> the one line on stderr."""

    def check(exit_code: int, code: int, name: str, *arguments: object) -> str:
        result = command(name, *arguments)
        assert result.returncode == exit_code, result.stderr
        assert result.stderr.startswith(f"MZ-{code}") and result.stderr.count("\n") == 1, result.stderr
        assert len(result.stderr) <= 301
        return result.stderr

    return check
