"""What a new run names wrongly is told before torch is imported, and nothing is left behind."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.data.origin import read_origin
from tests.tiny_run import ROOT, TinyData

CODE = """
import sys
from megazero.__main__ import main
code = main(sys.argv[1:])
sys.exit(code + 100 * ("torch" in sys.modules))
"""
WRONG = [
    ("data.train=no/such", 1, "MZ-201 no/such.idx: no such token file"),
    ("data.valid=no/such", 1, "MZ-201 no/such.idx: no such token file"),
    ("data.validation=[{path: no/such}]", 1, "MZ-201 no/such.idx: no such token file"),
    ("data.tokenizer=no/such.model", 1, "MZ-209 no/such.model: tokenizer cannot be read"),
    ("model.vocab=100", 2, "MZ-112 "),
]


def train(data: TinyData, run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", CODE, "train", "--config", str(data.config), f"run.dir={run}", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(("word", "code", "said"), WRONG)
def test_a_wrong_name_needs_no_torch(tiny_data: TinyData, tmp_path: Path, word: str, code: int, said: str) -> None:
    done = train(tiny_data, tmp_path / "run", word)
    assert (done.returncode, done.stdout) == (code, "") and done.stderr.startswith(said), done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_needs_no_torch(tiny_data: TinyData, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    done = train(tiny_data, tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"MZ-110 {tmp_path}: holds a run already")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_token_files_of_another_tokenizer_need_no_torch(tiny_data: TinyData, tmp_path: Path) -> None:
    """Of as many ids: only the fingerprint tells that the same ids mean other text."""
    other = tmp_path / "other"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{tiny_data.train}{suffix}", f"{other}{suffix}")
    origin = read_origin(tiny_data.train)
    assert origin is not None
    replace(origin, tokenizer="0123456789abcdef").write(other)
    done = train(tiny_data, tmp_path / "run", f"data.train={other}")
    assert done.returncode == 1 and done.stderr.startswith(f"MZ-221 {other}.bin: was made by the tokenizer 0123")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()
