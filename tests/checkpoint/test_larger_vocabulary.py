"""A run begins with the weights of a smaller vocabulary: rows that they lack have the values of a new run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.__main__ import main
from megazero.base.errors import UserError
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.kernels import counter
from megazero.observe.jsonl import read_rows
from megazero.tools.training.launch import launch
from tests.checkpoint.grids import logical_state
from tests.tiny_run import TinyData

# One step whose update is less than half an ulp of any weight: what is saved after it is what was loaded.
STILL = ("precision.dtype=fp64", "model.dropout=0.0", "run.steps=1", "optimizer.lr=1e-30", "schedule.min_lr=0.0")
STILL += ("schedule.warmup=0", "optimizer.weight_decay=0.0", "run.seed=5")
OLD, NEW, HIDDEN = 400, 411, 40  # 411 is odd: padded over two tensor ranks
TABLES = {True: ("embedding.tokens.weight",), False: ("embedding.tokens.weight", "head.weight")}


@pytest.fixture(scope="module")
def sources(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Runs of two steps with 400 tokens, tied and not."""
    made = {}
    for tied in TABLES:
        made[tied] = tmp_path_factory.mktemp("source") / "run"
        options = ("precision.dtype=fp64", f"model.tie_embeddings={tied}", "run.steps=2")
        assert launch(tiny_data.load(made[tied], *options), "small", 1) == 0
    return made


def grown(tiny_data: TinyData, folder: Path, source: Path, tied: bool, ranks: int, *options: str) -> dict[str, Any]:
    """What a run holds after its first step, once it has begun with the source's weights."""
    begin = (f"checkpoint.resume={source}", "checkpoint.load=weights", f"model.vocab={NEW}")
    config = tiny_data.load(folder, *STILL, f"model.tie_embeddings={tied}", *begin, *options)
    assert launch(config, "small", ranks) == 0
    return logical_state(folder)[1]


def same_rows(held: dict[str, Any], source: Path, tied: bool, dtype: torch.dtype = torch.float64) -> None:
    _, before = logical_state(source)
    assert held.keys() == before.keys()
    for name, kinds in held.items():
        expected: Tensor = before[name]["weight"].to(dtype)
        if name in TABLES[tied]:
            fresh = counter.normal(5, name, OLD * HIDDEN, NEW * HIDDEN).mul_(0.02)
            expected = torch.cat([expected, fresh.to(dtype)])
        assert torch.equal(kinds["weight"], expected), name
        gradient = kinds["exp_avg"] / (1 - 0.9)  # of moments that began at zero, new rows and old
        assert torch.allclose(kinds["exp_avg_sq"], 0.05 * gradient**2, rtol=1e-9, atol=0.0), name


GRIDS = {
    "one": (1, ()),
    "tensor-pipeline": (4, ("parallel.tensor=2", "parallel.pipeline=2", "zero.stage=1")),
    "tensor-data": (4, ("parallel.tensor=2", "zero.stage=3")),
    "stage-0": (2, ("zero.stage=0",)),
    "stage-2": (2, ("zero.stage=2", "zero.offload.optimizer=cpu")),
}
QUICK = [(True, "one"), (True, "tensor-pipeline"), (False, "tensor-data")]
FULL = [(tied, grid) for tied in TABLES for grid in GRIDS if (tied, grid) not in QUICK]


@pytest.mark.parametrize(("tied", "grid"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)])
def test_new_rows_are_born_and_old_ones_taken(
    tiny_data: TinyData, sources, tmp_path: Path, tied: bool, grid: str, capfd
) -> None:
    ranks, options = GRIDS[grid]
    same_rows(grown(tiny_data, tmp_path / "run", sources[tied], tied, ranks, *options), sources[tied], tied)
    out, err = capfd.readouterr()
    said = f"beginning with the weights of {sources[tied]}/checkpoints/step_00000002 and initial values in 11 new rows"
    assert f"{said} of the vocabulary" in out
    rows = f"{NEW - OLD} rows ({(NEW - OLD) / NEW:.2%}) are never used"
    assert err == f"warning: model.vocab is {NEW}, {tiny_data.tokenizer} has {OLD} ids: {rows}\n"


def test_all_grids_begin_with_one_loss(tiny_data: TinyData, sources, tmp_path: Path, capsys) -> None:
    for grid in ("one", "tensor-data"):
        ranks, options = GRIDS[grid]
        grown(tiny_data, tmp_path / grid, sources[True], True, ranks, *options)
    losses = [read_rows(tmp_path / grid / "metrics.jsonl")[0]["loss"] for grid in ("one", "tensor-data")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)


def test_an_import_grows_too(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """It has weights alone, so with `all` as well."""
    from tests.tools.test_convert import gpt2

    gpt2().save_pretrained(tmp_path / "theirs")
    source = tmp_path / "imported"
    assert main(["import", "--from", "hf", "--model", str(tmp_path / "theirs"), "--out", str(source)]) == 0
    options = (*STILL[1:], f"data.train={tiny_data.train}", f"checkpoint.resume={source}", f"model.vocab={NEW}")
    options += ("batch.global=4", f"run.dir={tmp_path / 'run'}")
    assert launch(load(str(source / "config.yaml"), list(options)), "grown", 1) == 0
    held, before = logical_state(tmp_path / "run")[1], logical_state(source)[1]
    name = TABLES[True][0]
    assert torch.equal(held[name]["weight"][: OLD * HIDDEN], before[name]["weight"])
    fresh = counter.normal(5, name, OLD * HIDDEN, NEW * HIDDEN).mul_(0.02).float()
    assert torch.equal(held[name]["weight"][OLD * HIDDEN :], fresh)


def test_an_older_step_serves_where_the_newest_is_damaged(tiny_data: TinyData, sources, tmp_path: Path, capfd) -> None:
    """What was read of the damaged one leaves nothing in the new rows."""
    source = Path(shutil.copytree(sources[True], tmp_path / "source"))
    options = (f"checkpoint.resume={source}", "precision.dtype=fp64", "run.steps=3", "checkpoint.resume=auto")
    assert launch(tiny_data.load(source, *options), "small", 1) == 0
    shard = Store(source / "checkpoints").path(3) / "shard_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    capfd.readouterr()
    held = grown(tiny_data, tmp_path / "run", source, True, 1)
    assert "going on from an older step" in capfd.readouterr().err
    same_rows(held, sources[True], True)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (("checkpoint.load=all",), "model.vocab 400 -> 411"),
        (("checkpoint.load=optimizer",), "model.vocab 400 -> 411"),
        (("checkpoint.load=weights", "model.vocab=399"), "model.vocab 400 -> 399"),
        (("checkpoint.load=weights", "model.hidden=48"), "model.hidden 40 -> 48"),
    ],
)
def test_what_is_refused(tiny_data: TinyData, sources, tmp_path: Path, changes, what: str) -> None:
    """One count of updates corrects all moments: new rows would have none that fit it."""
    options = ("precision.dtype=fp64", "run.steps=3", f"model.vocab={NEW}", "data.tokenizer=null")
    options += (f"checkpoint.resume={sources[True]}",)
    with pytest.raises(UserError, match="MZ-412") as caught:
        launch(tiny_data.load(tmp_path / "run", *options, *changes), "small", 1)
    said, grows = str(caught.value), "weights" not in changes[0]
    assert what in said and ("begin a run with checkpoint.load=weights" in said) == grows
    assert not (tmp_path / "run/metrics.jsonl").exists()
