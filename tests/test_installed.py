"""megazero as pip installs it, away from the repository: configs, verbs, messages, and packages that are not there."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from shutil import copyfile, copytree

import pytest

from megazero.__main__ import main
from tests.house.source import Source, project
from tests.quiet import without_heartbeat
from tests.tiny_run import ROOT, TinyData

_COMMANDS = r"\b(?:train|preprocess|inspect|merge|train_tokenizer)\.py\b"
# A message may name a target of make if it says that a checkout has it.
_MAKE = r"\bmake (?:data|setup|quickstart|test)(?!\S* in a checkout)"
CHECKOUT = re.compile(rf"{_MAKE}|\b(?:scripts|docs|data_tools|examples)/|{_COMMANDS}")

NEEDED = {"torch", "numpy", "einops", "pydantic", "ruamel.yaml", "safetensors", "sentencepiece", "protobuf"}
NEEDED |= {"xxhash"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel puts into site-packages."""
    copy, site = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("site")
    for name in ("megazero", "configs", "data_tools"):
        copytree(ROOT / name, copy / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copyfile(ROOT / name, copy / name)
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run(line, cwd=copy, check=True)
    (wheel,) = copy.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return site


def installed(site: Path, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    line = [sys.executable, "-P", "-m", "megazero", *map(str, words)]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_has_all_that_is_read_at_run_time(site: Path) -> None:
    for folder in ("megazero", "data_tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (site / path.relative_to(ROOT)).is_file(), path
    shipped = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    assert len(shipped) > 10 and all((site / "megazero" / path).is_file() for path in shipped)


def test_what_can_be_left_out_is_an_extra(site: Path) -> None:
    (metadata,) = site.glob("megazero-*.dist-info/METADATA")
    needed = Parser().parsestr(metadata.read_text()).get_all("Requires-Dist") or []
    plain = {re.split(r"[^\w.-]", line)[0] for line in needed if "extra ==" not in line}
    assert plain == NEEDED
    for line in ('matplotlib; extra == "plot"', 'wandb; extra == "wandb"', 'pytest; extra == "test"'):
        assert line in needed
    assert {'matplotlib; extra == "test"', 'wandb; extra == "test"'} <= set(needed)


@pytest.mark.full
def test_from_text_to_a_sample_anywhere(site: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        (tmp_path / f"corpus/{number}.txt").write_text(
            f"The {number} quick brown foxes jump over {number} dogs.\n" * 30
        )

    def run(*words: object) -> str:
        done = installed(site, tmp_path, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("tokenizer", "--input", "corpus", "--output", "my.model", "--vocab", 300)
    run("preprocess", "--input", "corpus", "--tokenizer", "my.model", "--output", "my", "--workers", 1)
    assert json.loads(run("inspect", "my", "--tokenizer", "my.model", "--json"))["documents"] == 20
    assert "40 documents" in run("merge", "my", "my", "--output", "twice")
    sizes = ["model.layers=1", "model.hidden=32", "model.seq_len=16", "model.vocab=300", "run.steps=1"]
    data = ["data.train=twice", "data.tokenizer=my.model", "data.valid=null"]
    assert "files in runs/tiny: " in run("train", "--config", "tiny", *sizes, *data)
    run("generate", "--run", "runs/tiny", "--prompt", "The", "--tokens", 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--config", "tiny"], "`megazero tokenizer --input TEXT"),
        (
            ["train", "--config", "tiny", "data.tokenizer=null"],
            "make token files from your text with `megazero preprocess`",
        ),
        (["explain", "--config", "gpt13b"], "shipped configs, for --config: command_r7b, "),
        (["plan", "--config", "gpt100b", "c4.yaml", "--gpus", "32", "--hardware", "h200"], "fits"),
        (["preprocess", "--input", "x"], "see `megazero preprocess --help`"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_messages_name_what_an_installed_copy_has(site: Path, tmp_path: Path, words: list[str], said: str) -> None:
    done = installed(site, tmp_path, *words)
    text = done.stdout + without_heartbeat(done.stderr)
    assert said in text and not CHECKOUT.search(text), text


def checkout_words(source: Source) -> Iterator[str]:
    """Yield texts that name what only a checkout has; not documents."""
    fine = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    for node in source.nodes:
        if isinstance(node, ast.Constant) and id(node) not in fine and CHECKOUT.search(str(node.value)):
            yield f"{source.at(node)}: {node.value}"


def test_no_message_names_what_only_a_checkout_has() -> None:
    sources = [source for source in project() if source.path.startswith(("megazero/", "data_tools/"))]
    found = [line for source in sources for line in checkout_words(source)]
    assert [
        line for line in found if not any(fine in line for fine in ("run `make setup`, which installs all packages",))
    ] == []
    assert [*checkout_words(Source("megazero/planted.py", "do = 'run `make data`'"))] != []
    assert [*checkout_words(Source("megazero/planted.py", "do = 'run `make data` in a checkout'"))] == []


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed


def test_without_matplotlib_a_run_has_no_picture_and_says_so_first(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "matplotlib", "matplotlib.figure", "matplotlib.ticker", "wandb")
    line = ["train", "--config", str(tiny_data.config), f"run.dir={tmp_path / 'run'}", "run.steps=1", "data.valid=null"]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert (
        err.splitlines()[0]
        == "warning: the loss curve will not be drawn: matplotlib is not installed (pip install matplotlib)"
    )
    assert "loss curve" not in out and not (tmp_path / "run/loss.png").exists()
    assert main([*line, "checkpoint.resume=auto"]) == 0
    assert "nothing to do: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train", "observe.wandb=mine"],
            "MZ-160 observe.wandb: the wandb package is not installed; run ",
        ),
        (
            ["train", "observe.tensorboard=true"],
            "MZ-161 observe.tensorboard: the tensorboard package is ",
        ),
        (["schedule", "--draw", "s.png"], "MZ-121: the package matplotlib is not installed for "),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_missing_package_is_refused_at_the_start(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    without(monkeypatch, "matplotlib", "wandb", "tensorboard")
    verb, *options = words
    assert main([verb, "--config", "tiny", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(said) and err.count("\n") == 1 and "pip install" in err and [*tmp_path.iterdir()] == []
