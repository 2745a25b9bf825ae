"""Whatever happens to the files of a checkpoint is found before the first step, and an older one takes its place."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.checkpoint import shard as shard_module
from megazero.checkpoint.choose import load_newest
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import FILE_NAME, read_manifest
from megazero.checkpoint.retention import verify
from megazero.checkpoint.store import Store
from megazero.comm.grid import Grid
from megazero.observe.jsonl import read_rows
from megazero.plan.job import Job
from megazero.run.checkpointing import holdings_of
from megazero.run.folder import RunFolder
from megazero.tools.training.launch import launch
from megazero.zero.placement import Precision
from tests.checkpoint.grids import logical_state, save_after
from tests.layouts import CPU, SHAPES, Rank, job_on
from tests.ranks import run_ranks
from tests.tiny_run import TinyData, command

FOUR = job_on(tensor=2, data=2, accumulation=2, stage=1)
BLOCK = 4096


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same step of two runs that saw the same: files of the same names and sizes, but another run's."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        for name, steps in (("one", 2), ("other", 3)):
            run_ranks(4, save_after, FOUR, "deep", Precision(), folder / name, steps, tensor=2)
    return tuple(Store(RunFolder(folder / name).checkpoints).path(s) for name, s in (("one", 2), ("other", 3)))


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Many blocks in small files."""
    for module in ("shard", "manifest"):
        patch.setattr(f"megazero.checkpoint.{module}.BLOCK", BLOCK)


def spoil(folder: Path, other: Path, chance: random.Random) -> str:
    """Does some harm to one file; its name."""
    names = sorted(path.name for path in folder.iterdir())
    name, how = (
        chance.choice(names),
        chance.choice(("flip", "flip", "flip", "truncate", "delete", "swap", "foreign", "zero")),
    )
    path = folder / name
    raw = bytearray(path.read_bytes())
    if how == "flip":
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    elif how == "truncate":
        del raw[chance.randrange(len(raw)) :]
    elif how == "zero":  # a page that never reached the disk
        at = chance.randrange(len(raw)) // BLOCK * BLOCK
        page = bytes(len(raw[at : at + BLOCK]))
        raw[at : at + BLOCK] = page if raw[at : at + BLOCK] != page else page[:-1] + b"\1"
    elif how == "foreign":  # of another step of a run with the same shapes
        if name == FILE_NAME:  # which would be consistent with itself, and with nothing else here
            raw = bytearray((other / name).read_bytes())
            path.write_bytes(raw)
            return sorted(names)[1]
        raw = bytearray((other / name).read_bytes())
    elif how == "swap":
        one, two = chance.sample([n for n in names if n != FILE_NAME], 2)
        first, second = (folder / one).read_bytes(), (folder / two).read_bytes()
        (folder / one).write_bytes(second)
        (folder / two).write_bytes(first)
        return min(one, two)
    path.unlink()
    if how != "delete":
        path.write_bytes(raw)
    return name


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_a_hundred_random_corruptions(written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In the full matrix a thousand: every one is found, and the file is named."""
    small_blocks(monkeypatch)
    chance, (one, other) = random.Random(seed), written
    verify(one)
    for number in range(100):
        folder = Path(shutil.copytree(one, tmp_path / f"copy_{number}"))
        name = spoil(folder, other, chance)
        with pytest.raises(UserError, match="MZ-410") as caught:
            verify(folder)
        line = str(caught.value)
        assert len(line) <= 300 and "; restore the file, or resume from another step" in line
        assert name in line or (name.startswith("shard") and "shard_" in line), (name, line)
        shutil.rmtree(folder)


def try_all(grid: Grid, layout: Job, folders: list[Path]) -> list[str]:
    """What every rank is told of each folder; "" where it was loaded."""
    rank = Rank(grid, layout, SHAPES["deep"], Precision())
    holdings = holdings_of(rank.built, saves=False)
    found = []
    for folder in folders:
        said: list[str] = [""]
        try:
            load_newest(
                Store(folder.parent),
                [2],
                holdings,
                check=lambda manifest, where: None,
                world=grid["world"],
                device=CPU,
                damaged=lambda step, fault, said=said: said.append(fault),
            )
        except UserError as error:
            assert error.code == 411
        found.append(said[-1])
    return found


@pytest.mark.parametrize(
    "layout", [FOUR, job_on(data=2, accumulation=4, stage=3), job_on(pipeline=4, accumulation=4, stage=1)]
)
def test_together_the_ranks_see_every_byte(
    written, tmp_path: Path, layout: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None reads everything, and yet a flip in any value is found by one and told to all."""
    small_blocks(monkeypatch)
    one, _ = written
    folders = []
    for index in range(4):
        size = (one / f"shard_{index:05d}.safetensors").stat().st_size
        for position in (size // 3, size // 2, size - 1):
            folder = Path(shutil.copytree(one, tmp_path / f"{index}_{position}" / "step_00000002"))
            path = folder / f"shard_{index:05d}.safetensors"
            raw = bytearray(path.read_bytes())
            raw[position] ^= 1
            path.write_bytes(raw)
            folders.append(folder)
    whole = Path(shutil.copytree(one, tmp_path / "whole" / "step_00000002"))
    ranks = run_ranks(layout.ranks, try_all, layout, [*folders, whole], tensor=layout.tensor, pipeline=layout.pipeline)
    assert all(rank == ranks[0] for rank in ranks)
    for folder, fault in zip(folders, ranks[0], strict=False):
        assert f"shard_0000{folder.parent.name[0]}.safetensors: block " in fault
    assert ranks[0][-1] == ""


def bytes_read(grid: Grid, layout: Job, folder: Path) -> int:
    rank = Rank(grid, layout, SHAPES["deep"], Precision())
    holdings = holdings_of(rank.built, saves=False)
    return load_tensors(folder, read_manifest(folder), holdings)


def test_each_rank_reads_what_it_needs(written, monkeypatch: pytest.MonkeyPatch) -> None:
    """To whole blocks: an eighth each over eight ranks, whoever wrote it."""
    monkeypatch.setattr(shard_module, "BLOCK", BLOCK)
    small_blocks(monkeypatch)
    one, _ = written
    total = sum(file.size for file in read_manifest(one).files)
    layout = job_on(tensor=2, data=4, accumulation=2, stage=3)
    read = run_ranks(8, bytes_read, layout, one, tensor=2)
    assert max(read) < 0.45 * total and sum(read) < 2.2 * total  # blocks of 4 KB beside pieces of some hundred bytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_older_step_takes_its_place(tiny_data: TinyData, tmp_path: Path, ranks: int) -> None:
    """And the run ends as if nothing had been; what was damaged is put aside."""
    split = (f"parallel.tensor={ranks}",)
    line = ("train.py", "--config", tiny_data.config, "run.steps=4", "data.valid=null", "checkpoint.every=1", *split)
    assert command(*line, f"run.dir={tmp_path / 'whole'}").returncode == 0
    run = RunFolder(shutil.copytree(tmp_path / "whole", tmp_path / "run"))
    store = Store(run.checkpoints)
    for step, name in ((4, "shard_00000.safetensors"), (3, FILE_NAME)):
        raw = bytearray((store.path(step) / name).read_bytes())
        raw[-50] ^= 1
        (store.path(step) / name).write_bytes(raw)
    done = command(*line, f"run.dir={run.path}", "checkpoint.resume=auto")
    assert done.returncode == 0 and f"going on from {store.path(2)}" in done.stdout
    first, second = done.stderr.splitlines()
    assert first.startswith(f"warning: MZ-410 {store.path(4)}/shard_00000.safetensors: block 0 (bytes 0 to ")
    assert first.endswith("; going on from an older step") and f"{store.path(3)}/manifest.json: " in second
    aside = sorted(
        path.name.rpartition(".")[0] for path in run.checkpoints.iterdir() if path.name.startswith("damaged")
    )
    assert aside == ["damaged_step_00000003", "damaged_step_00000004"] and store.steps() == [4, 3, 2, 1]
    _, ours = logical_state(run.path)
    _, theirs = logical_state(tmp_path / "whole")
    assert all(ours[name][kind].equal(theirs[name][kind]) for name in theirs for kind in theirs[name])
    assert [row["loss"] for row in read_rows(run.metrics)] == [
        row["loss"] for row in read_rows(tmp_path / "whole/metrics.jsonl")
    ]


def test_with_none_left_nothing_is_trained(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    options = ("run.steps=2", "data.valid=null", "checkpoint.every=1")
    config = tiny_data.load(tmp_path / "run", *options)
    assert launch(config, "small", 1) == 0
    for step in (1, 2):
        (tmp_path / f"run/checkpoints/step_{step:08d}/manifest.json").unlink()
    with pytest.raises(UserError, match=r"MZ-411 .*none of 2 checkpoints is whole \(steps 2, 1\)") as caught:
        launch(tiny_data.load(tmp_path / "run", *options, "checkpoint.resume=auto"), "small", 1)
    assert caught.value.exit_code == 1
    step = tmp_path / "run/checkpoints/step_00000002"
    with pytest.raises(UserError, match="MZ-402"):
        launch(tiny_data.load(tmp_path / "new", *options, f"checkpoint.resume={step}"), "small", 1)


@pytest.mark.parametrize("kind", ["a link", "a FIFO", "a folder", "a device"])
@pytest.mark.parametrize("name", ["manifest.json", "shard_00000.safetensors"])
def test_what_is_no_file_of_a_checkpoint(finished: RunFolder, tmp_path: Path, name: str, kind: str) -> None:
    """Nothing blocks, and nothing outside the folder is read."""
    folder = Path(shutil.copytree(Store(finished.checkpoints).path(4), tmp_path / "step_00000004"))
    path = folder / name
    path.rename(tmp_path / "elsewhere")
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"MZ-410 .*{name}: cannot be read: expected a regular file"):
        verify(folder)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_manifest_that_may_not_be_read_is_not_damaged(finished: RunFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Store(finished.checkpoints).path(4), tmp_path / "step_00000004"))
    (folder / FILE_NAME).chmod(0)
    with pytest.raises(UserError, match=r"MZ-401 .*cannot be read: Permission denied"):
        read_manifest(folder)


def test_a_run_with_sources_that_grew_is_not_called_damaged(finished: RunFolder, tmp_path: Path) -> None:
    """An earlier version wrote such manifests; another step would not be better."""
    folder = Path(shutil.copytree(Store(finished.checkpoints).path(4), tmp_path / "step_00000004"))
    content = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps(content | {"shards": {"web": [{"first": 0, "shards": []}]}}))
    with pytest.raises(UserError, match=r"MZ-412 .*growing sources, .*; resume with the version that wrote it"):
        read_manifest(folder)
