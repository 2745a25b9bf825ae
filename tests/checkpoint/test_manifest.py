"""Manifests: canonical, complete, and not to be edited."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megazero.base.errors import UserError
from megazero.checkpoint.manifest import FILE_NAME, FORMAT, File, Logical, Manifest, read_manifest, step_of
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.shard import BLOCK
from megazero.config.flat import plain
from megazero.config.schema import Config, resolved
from megazero.config.stages import Course
from megazero.run.history import saved_options
from megazero.run.loading import check_same

PROGRESS = Progress(updates=3, skipped=1, overflows=0, next_sample=32, loss_scale=None, good_steps=0)


def manifest(**changes: Any) -> Manifest:
    content = {
        "format": FORMAT,
        "run": "abc",
        "step": 4,
        "grid": {"data": 2},
        "dtype": "F32",
        "kinds": ["weight", "exp_avg", "exp_avg_sq"],
        "tensors": {"a": Logical(shape=[2, 3], pieces=[[0, 0, 4, 100, 116, 132], [1, 4, 6, 100, 108, 116]])},
        "block": BLOCK,
        "files": [File(name=f"shard_{i:05d}.safetensors", size=200, blocks=["0" * 16]) for i in range(2)],
        "progress": PROGRESS,
        "random": {"seed": 0},
        "identity": {"data": "x", "tokenizer": None},
        "config": {"model.layers": 2, "batch.global": 8},
        "software": {"megazero": "0"},
    }
    return Manifest(**{**content, **changes})


def bytes_of(**changes: Any) -> bytes:
    """Return a manifest with some fields of any value, and the digest that fits them."""
    values = {name: getattr(manifest(), name) for name in Manifest.model_fields}
    return Manifest.model_construct(**{**values, **changes}).to_bytes()


def refuse(folder: Path, raw: bytes, what: str) -> None:
    (folder / FILE_NAME).write_bytes(raw)
    with pytest.raises(UserError, match=rf"MZ-410 .*{FILE_NAME}: {what}") as caught:
        read_manifest(folder)
    assert len(str(caught.value)) <= 300


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(manifest().to_bytes())
    found = read_manifest(tmp_path)
    assert found.model_copy(update={"digest": ""}) == manifest()
    assert found.to_bytes() == manifest().to_bytes()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    raw = manifest().to_bytes()
    for position in range(len(raw)):
        for bit in (1, 32):
            refuse(tmp_path, raw[:position] + bytes([raw[position] ^ bit]) + raw[position + 1 :], "")


@pytest.mark.parametrize("cut", [0, 1, 50, -2])
def test_a_truncated_one_is_found(tmp_path: Path, cut: int) -> None:
    refuse(tmp_path, manifest().to_bytes()[:cut], "is not a manifest|was edited or damaged")


def test_a_missing_one_is_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MZ-410 .*cannot be read: No such file"):
        read_manifest(tmp_path)


def test_an_edited_one_is_found(tmp_path: Path) -> None:
    content = json.loads(manifest().to_bytes())
    content["step"] = 5
    refuse(tmp_path, json.dumps(content).encode(), r"was edited or damaged: expected SHA-256 \w{16}, got \w{16}")
    content = json.loads(manifest().to_bytes())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dtype": "F8"}, "dtype: String should match pattern"),
        ({"kinds": ["weight", "Exp"]}, "kinds.1: String should match pattern"),
        ({"kinds": ["weight", *"abcdefghi"]}, "kinds: List should have at most 9 items"),
        ({"block": 7}, "block 7"),
        ({"kinds": ["exp_avg"]}, r"kinds \['exp_avg'\]"),
        ({"kinds": ["weight", "weight", "exp_avg"]}, "kinds"),
        ({"progress": None}, "kinds"),
        ({"progress": Progress.model_construct(**dict(PROGRESS, next_sample=2**63))}, "next_sample: .*less than"),
        ({"files": [File(name="shard_00000.safetensors", size=2 * BLOCK, blocks=["0"])]}, "with 1 hashes"),
        ({"files": [File(name="shard_00001.safetensors", size=200, blocks=["0"])]}, "file 0 is shard_00001"),
        ({"step": 5}, "updates and skipped steps do not add up to step 5"),
        ({"tensors": {"a": Logical(shape=[6], pieces=[[0, 0, 4, 100, 116, 132]])}}, "a has 4 of 6 elements"),
        ({"tensors": {"a": Logical(shape=[6], pieces=[[0, 1, 6, 100, 120, 140]])}}, "1 to 6 after element 0"),
        ({"tensors": {"a": Logical(shape=[6], pieces=[[0, 0, 6, 190, 100, 100]])}}, "after the end of shard_00000"),
        ({"tensors": {"a": Logical(shape=[6], pieces=[[2, 0, 6, 100, 100, 100]])}}, "has a piece"),
        ({"tensors": {"a": Logical(shape=[6], pieces=[[0, 0, 6, 100]])}}, "has a piece"),
        ({"tensors": {"a": Logical(shape=[0], pieces=[[0, 0, 0, 100, 100, 100]])}}, "has a piece of elements 0 to 0"),
        (
            {"tensors": {"a": Logical.model_construct(shape=[2**62] * 1000, pieces=[])}},
            "tensors.a.shape: List should have at most 8 items",
        ),
        ({"kinds": ["weight"]}, "a has a piece"),  # an optimizer may keep no state, but then there is none in the files
    ],
)
def test_one_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    """Even if whoever made it has made the right digest too: no reader looks outside a file."""
    refuse(tmp_path, bytes_of(**changes), f"(is inconsistent|is not a manifest): .*{what}")


@pytest.mark.parametrize(
    "name", ["../shard_00000.safetensors", "/etc/passwd", "shard_00000.safetensors/..", "shard_0.safetensors", ""]
)
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    content = json.loads(manifest().to_bytes())
    content["files"][0]["name"] = name
    refuse(tmp_path, json.dumps(content).encode(), "is not a manifest: files.0.name")


@pytest.mark.parametrize("raw", [b"[]", b"null", b"\xff", b'{"a": ' + b"[" * 100_000, b"{}"])
def test_what_is_no_manifest_at_all(tmp_path: Path, raw: bytes) -> None:
    refuse(tmp_path, raw, "is not a manifest")


ROW = {"step": 4, "loss": 1.25, "mfu": None, "skipped": 1, "seconds": {"data": 0.5, "save": 1}}


def test_the_row_of_a_step_goes_along_and_older_ones_have_none(tmp_path: Path) -> None:
    """A manifest without a row is the same file as before there were rows in it."""
    assert b'"row"' not in manifest().to_bytes() and b'"carried"' not in manifest().to_bytes()
    progress = manifest().progress
    assert progress is not None
    with_row = manifest(progress=progress.model_copy(update={"row": ROW}))
    (tmp_path / FILE_NAME).write_bytes(with_row.to_bytes())
    found = read_manifest(tmp_path).progress
    assert found is not None and found.row == ROW


def test_a_folder_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    for name, fits in (("step_00000004", True), ("step_00000005", False), ("anything", True)):
        folder = tmp_path / name
        folder.mkdir()
        if fits:
            (folder / FILE_NAME).write_bytes(manifest().to_bytes())
            assert read_manifest(folder).step == 4
        else:
            refuse(folder, manifest().to_bytes(), "is inconsistent: the folder is named step 5, .* says step 4")
    assert step_of(Path("step_000000004")) is None  # another name of step 4
    assert step_of(Path("step_1234567890")) == 1234567890


def test_kinds_and_sizes_of_the_file(tmp_path: Path) -> None:
    """A FIFO would block, a link leads elsewhere, 9 MB without shards are no manifest."""
    path = tmp_path / FILE_NAME
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"MZ-410 .*expected a regular file, got a FIFO"):
        read_manifest(tmp_path)
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(manifest().to_bytes())
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"MZ-410 .*symbolic link"):
        read_manifest(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"MZ-410 .*expected a regular file, got a folder"):
        read_manifest(tmp_path)
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(9 << 20)
    with pytest.raises(UserError, match=r"MZ-410 .*expected at most 8,388,608 bytes, got 9,437,184"):
        read_manifest(tmp_path)


def test_an_option_that_is_younger_than_a_manifest_has_its_default() -> None:
    """So that a run of older code goes on: a new option's default computes what was computed before it."""
    options = saved_options(manifest())
    assert (options["model.layers"], options["model.qk_norm"], options["data.pack"]) == (2, "none", False)


def test_another_shape_is_not_taken_by_permission() -> None:
    """No `--allow-change` gives a tensor another shape."""
    config = resolved(Config())
    found = manifest(config=plain(config))
    ours = found.model_copy(update={"tensors": {"a": Logical(shape=[3, 2], pieces=[])}})
    with pytest.raises(UserError, match=r"a \[2, 3\] -> \[3, 2\]; resume with the config it was made with$"):
        check_same(found, ours, Course(config), Path("step"))
