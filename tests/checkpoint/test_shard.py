"""Shards: readable by safetensors, and every damage to a byte that is read is found before the byte is used."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megazero.base.errors import UserError
from megazero.checkpoint import shard as module
from megazero.checkpoint.shard import File, open_shard, plan_shard, write_shard


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[File, list[int]]:
    keys = [(name, tensor.dtype, tensor.numel()) for name, tensor in tensors.items()]
    beginning, places = plan_shard(keys, {"about": "a test"})
    return write_shard(folder / "shard_00000.safetensors", beginning, list(tensors.values())), places


def some(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes)}


@settings(max_examples=25)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.sampled_from([64, 1000, 4096]))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], block: int) -> None:
    folder, tensors = tmp_path_factory.mktemp("shard"), some(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        shard, places = written(folder, tensors)
        path = folder / shard.name
        assert shard.size == path.stat().st_size and len(shard.blocks) == -(-shard.size // block)
        with open_shard(folder, shard) as reader:
            for place, tensor in zip(places, tensors.values(), strict=True):
                data = b"".join(bytes(part) for _, part in reader.read(place, place + tensor.nbytes))
                assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), tensor)
    theirs = load_file(path)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())


def test_a_read_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, _ = written(tmp_path, some(500))
    short = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: short(file, [into[0][:700]], at))
    with open_shard(tmp_path, shard) as reader:
        assert b"".join(bytes(part) for _, part in reader.read(0, shard.size)) == (tmp_path / shard.name).read_bytes()


def test_every_block_that_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 256)
    shard, _ = written(tmp_path, some(500))
    path = tmp_path / shard.name
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        line = rf"MZ-410 .*{shard.name}: block {position // 256} .*expected xxh3 \w{{16}}, got"
        with open_shard(tmp_path, shard) as reader, pytest.raises(UserError, match=line):
            list(reader.read(0, shard.size))


@pytest.mark.parametrize("size", [0, 1, 777])
def test_another_size_is_found_at_once(tmp_path: Path, size: int) -> None:
    shard, _ = written(tmp_path, some(500))
    os.truncate(tmp_path / shard.name, size)
    line = rf"MZ-410 .*expected {shard.size:,} bytes, got {size}"
    with pytest.raises(UserError, match=line), open_shard(tmp_path, shard):
        pass


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    shard, _ = written(tmp_path, some(500))
    (tmp_path / shard.name).rename(tmp_path / "elsewhere")
    (tmp_path / shard.name).symlink_to("elsewhere")
    with pytest.raises(UserError, match=r"MZ-410 .*expected a regular file, got a symbolic link"):
        open_shard(tmp_path, shard).__enter__()


def test_a_file_is_never_written_twice(tmp_path: Path) -> None:
    written(tmp_path, some(5))
    with pytest.raises(FileExistsError):
        written(tmp_path, some(5))


def test_bits_that_are_no_numbers_are_kept(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -1, -(2**31), 0], dtype=torch.int32).view(torch.float32)  # nans, -0.0
    shard, _ = written(tmp_path, {"bits": bits})
    assert torch.equal(load_file(tmp_path / shard.name)["bits"].view(torch.int32), bits.view(torch.int32))
