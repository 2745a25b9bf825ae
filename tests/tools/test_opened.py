"""`megazero.load`: a run, one of its checkpoints, or a folder of transformers, with equal logits."""

from pathlib import Path

import pytest
import torch
import transformers

import megazero
from megazero.__main__ import main
from megazero.base.errors import UserError
from megazero.checkpoint.store import Store
from tests.tiny_run import TinyData, command
from tests.tools.convert.models import model_of

IDS = torch.randint(400, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers, the run that it was imported to, and the export of that."""
    place = tmp_path_factory.mktemp("opened")
    model_of("qwen3").save_pretrained(place / "theirs")
    assert main(["import", "--from", "hf", "--model", str(place / "theirs"), "--out", str(place / "run")]) == 0
    assert main(["export", "--to", "hf", "--run", str(place / "run"), "--out", str(place / "again")]) == 0
    return place


@pytest.mark.parametrize("name", ["theirs", "run", "run/checkpoints/step_00000000", "again"])
def test_every_folder_gives_transformers_logits(folders: Path, name: str) -> None:
    opened = megazero.load(folders / name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders / "theirs", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(IDS).logits
    found = opened.logits(IDS)
    assert found.shape == expected.shape and (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(opened.logits(IDS[0].tolist()), opened.logits(IDS[:1])[0])
    assert opened.config.model.qk_norm == "head" and opened.tokenizer is None
    assert megazero.load(folders / name, torch.float64).logits(IDS).dtype == torch.float64


def test_a_trained_run_has_its_tokenizer(tiny_data: TinyData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = ("train.py", "--config", str(tiny_data.config), f"run.dir={run}", "run.steps=2", "checkpoint.every=1")
    done = command(*line)
    assert done.returncode == 0, done.stderr
    newest, first = megazero.load(run), megazero.load(Store(run / "checkpoints").path(1))
    assert newest.tokenizer is not None
    ids = newest.tokenizer.encode("the")
    assert not torch.equal(newest.logits(ids), first.logits(ids))


@pytest.mark.parametrize(
    ("ids", "what"),
    [([], "expected ids"), ([400], "MZ-112: id 400 is not one of 400; change"), ([0.5], "expected ids")],
)
def test_wrong_ids_get_one_line(folders: Path, ids: list, what: str) -> None:
    with pytest.raises(UserError, match=what):
        megazero.load(folders / "run").logits(ids)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MZ-113 .*is not a run's folder"):
        megazero.load(tmp_path)
