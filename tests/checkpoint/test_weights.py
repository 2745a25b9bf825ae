"""The weights file: whole or absent, exact, each parameter once; and what is wrong with one is said in a line."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from megazero.build import build_model
from megazero.checkpoint.weights import FILE_NAME, load_weights, save_weights
from megazero.errors import UserError
from tests.tiny_run import ROOT, TinyData, train

# 20 times: forks a child that saves one step after the other, and kills it after a while.
STORM = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from megazero.checkpoint.weights import save_weights
torch.set_num_threads(1)
folder, tensors = Path(sys.argv[1]), {f"t{i}": torch.full((50_000,), float(i)) for i in range(4)}
pick, first = random.Random(0), 0
while first < 20_000 or not list(folder.glob("step_*")):
    child = os.fork()
    if child == 0:
        for step in range(first, first + 1000):
            save_weights(folder / f"step_{step:08d}", tensors, step)
    time.sleep(pick.uniform(0.0, 0.03) * (1 + first / 20_000))  # longer and longer where the disk is slow
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    first += 1000
"""


def meta(shapes: dict[str, tuple[int, ...]]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_what_is_loaded_is_what_was_trained(tiny_data: TinyData, tmp_path: Path, dtype: str):
    config = tiny_data.load(tmp_path / "run", "run.steps=2", f"precision.dtype={dtype}", "data.valid=null")
    trained = train(config).weights()
    path = save_weights(tmp_path / "step_00000002", trained, 2)
    assert path == tmp_path / "step_00000002" / FILE_NAME and path.parent.stat().st_mode & 0o777 == 0o755
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "step_00000002"]
    model = build_model(config)
    load_weights(path, dict(model.named_parameters()), torch.float64)
    assert dict(model.named_parameters()).keys() == trained.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name].to(torch.float64)) and parameter.device.type == "cpu"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weight_is_stored_once(tiny_data: TinyData, tmp_path: Path, tied: bool):
    options = ("run.steps=1", f"model.tie_embeddings={str(tied).lower()}", "data.valid=null")
    config = tiny_data.load(tmp_path / "run", *options)
    path = save_weights(tmp_path / "step_00000001", train(config).weights(), 1)
    with safe_open(path, framework="pt") as file:
        vocabularies = [name for name in file.keys() if file.get_slice(name).get_shape() == [400, 40]]  # noqa: SIM118
        assert file.metadata() == {"megazero": "weights 1, step 1"}
    assert vocabularies == (["embedding.tokens.weight"] if tied else ["embedding.tokens.weight", "head.weight"])
    model = build_model(config)
    load_weights(path, dict(model.named_parameters()), torch.float32)
    assert (model.head.weight is model.embedding.tokens.weight) == tied and not model.head.weight.is_meta


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files may have 100,000 bytes: a disk that fills up in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_that_is_full_leaves_nothing(small_files, tmp_path: Path):
    with pytest.raises(UserError, match=r"^MZ-403 .*step_00000001: weights not saved: .*; free space there") as caught:
        save_weights(tmp_path / "step_00000001", {"a": torch.zeros(100_000)}, 1)
    assert caught.value.exit_code == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, value: float):
    tensors = {"a": torch.zeros(3), "b": torch.tensor([1.0, value]), "c": torch.zeros(2)}
    with pytest.raises(UserError, match=r"^MZ-302 step=7 .*1 of 3 weights are not finite .*, first b; ") as caught:
        save_weights(tmp_path / "step_00000007", tensors, 7)
    assert caught.value.exit_code == 1 and list(tmp_path.iterdir()) == []


def test_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(UserError, match=r"^MZ-403 .*No such file"):
        save_weights(tmp_path / "gone" / "step_00000001", {"a": torch.zeros(3)}, 1)


def test_kill_storm_never_shows_half_a_file(tmp_path: Path):
    result = subprocess.run([sys.executable, "-c", STORM, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    saved = sorted(tmp_path.glob("step_*"))
    assert saved and list(tmp_path.glob(".step_*")), "some saves completed, some were cut short"
    for folder in saved:
        parameters = meta({f"t{i}": (50_000,) for i in range(4)})
        load_weights(folder / FILE_NAME, parameters, torch.float32)
        assert all(bool((parameters[f"t{i}"] == i).all()) for i in range(4))


def test_other_tensors_are_named(tmp_path: Path):
    path = tmp_path / FILE_NAME
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, path)
    for shapes, message in (
        ({"a": (2, 3)}, "1 tensors differ from the model's, first b"),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, "1 tensors differ from the model's, first c"),
        ({"a": (2, 3), "b": (5,)}, r"b: expected \(5,\), got \(4,\)"),
    ):
        with pytest.raises(UserError, match=rf"^MZ-404 {path}: {message}; is this the run's own config.yaml\?"):
            load_weights(path, meta(shapes), torch.float32)


@pytest.mark.parametrize("damage", ["absent", "empty", "cut", "header", "length", "folder"])
def test_damaged_file_is_one_line(tmp_path: Path, damage: str):
    path = tmp_path / FILE_NAME
    save_file({"a": torch.zeros(1000)}, path)
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "absent":
        header = content[:8] + b"]" + content[9:]
        length = b"\xff" * 8 + content[8:]
        path.write_bytes({"empty": b"", "cut": content[:-1], "header": header, "length": length}[damage])
    with pytest.raises(UserError, match=rf"^MZ-404 {path}: cannot be read: ") as caught:
        load_weights(path, meta({"a": (1000,)}), torch.float32)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
