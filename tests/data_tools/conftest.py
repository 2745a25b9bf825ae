"""A small tokenizer, and the commands as a user runs them."""

import contextlib
import io
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from data_tools import train_tokenizer

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
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """command("merge", "a", "--output", "b") runs `python data_tools/merge.py a --output b` in tmp_path."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        line, out, err = [str(argument) for argument in arguments], io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = import_module(f"data_tools.{name}").main(line)
            except SystemExit as end:  # of --help
                code = int(end.code or 0)
        return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())

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
