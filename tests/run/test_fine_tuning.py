"""Fine-tuning from imported weights: the loss of transformers over the answers, the same on every grid."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from data_tools import preprocess
from megazero.__main__ import main
from megazero.base.errors import UserError
from megazero.config.file import CONFIGS, load
from megazero.config.flat import flatten, spelt
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.loader import BatchLoader
from megazero.observe.jsonl import read_rows
from megazero.run.data import open_data
from megazero.run.folder import RunFolder
from megazero.tools.certify.tolerances import GRADIENT_FP32, LOSS_FP32, WEIGHTS_FP32, difference, weight_differences
from megazero.tools.training.launch import launch
from tests.data_tools.chats import MARKED, make_tokenizer, turns, write_chats
from tests.tiny_run import command, saved_weights

SEQUENCE = 64


class Tuning(NamedTuple):
    """A model of transformers, token files of conversations, and the options of a run from the one on the other."""

    theirs: Any
    data: Path
    options: list[str]


def conversations() -> list[list[dict[str, Any]]]:
    """Some short ones, and some whose answer lies behind what a window can hold, so that nothing of them counts."""
    rng = np.random.default_rng(1)
    words = ["parser", "argument", "action", "help", "default", "type"]

    def text(most: int) -> str:
        return " ".join(rng.choice(words, rng.integers(1, most)))

    chats = [turns(*(text(9) for _ in range(2 * int(rng.integers(1, 4))))) for _ in range(40)]
    return chats + [turns(" ".join(words * 20), text(9)) for _ in range(4)]


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("sft")
    make_tokenizer(folder / "theirs", MARKED)
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 340, "max_position_embeddings": SEQUENCE, "rms_norm_eps": 1e-5}
    torch.manual_seed(7)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # answers that are not all as likely
    theirs.save_pretrained(folder / "theirs")
    assert main(["import", "--from", "hf", "--model", str(folder / "theirs"), "--out", str(folder / "imported")]) == 0
    chats = write_chats(folder / "chats.jsonl", conversations())
    line = ["--input", str(chats), "--tokenizer", str(folder / "imported/tokenizer.json"), "--chat"]
    assert preprocess.main([*line, "--output", str(folder / "chats")]) == 0
    shipped = load("sft")
    values = flatten(load(str(folder / "imported/config.yaml")))
    options = [f"{name}={spelt(value)}" for name, value in values.items() if name.startswith("model.")]
    assert shipped.data.pack and shipped.data.mask_eod and shipped.checkpoint.load == "weights"
    options += [f"data.train={folder / 'chats'}", f"data.tokenizer={folder / 'imported/tokenizer.json'}"]
    options += [f"checkpoint.resume={folder / 'imported'}", "data.valid=0.1", "precision.dtype=fp32"]
    options += ["run.steps=3", "batch.global=4", "batch.micro=1", "schedule.warmup=1", "observe.every=1"]
    return Tuning(theirs, folder / "chats", [_given(option) for option in options])


def _given(option: str) -> str:
    return option.replace("=None", "=null").replace("=True", "=true").replace("=False", "=false")


def their_loss(tuning: Tuning, documents: list[int]) -> tuple[float, int]:
    """The loss of some conversations, each for itself, over the tokens of answers, and the number of those."""
    dataset, nats, count = IndexedDataset(tuning.data), 0.0, 0
    assert dataset.mask_digest is not None
    for document in documents:
        start, stop = dataset.bounds(document)
        stop = min(stop, start + SEQUENCE)
        ids = torch.from_numpy(dataset.read(start, stop).astype(np.int64))[None]
        scored = torch.from_numpy(dataset.scored(start, stop))[None]
        labels = torch.where(scored, ids, -100)
        with torch.no_grad():
            if scored.any():
                nats += tuning.theirs(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(1)).loss.item()
        count += int(scored.sum())
    return nats, count


def documents_of(tuning: Tuning, folder: Path, step: int) -> list[list[int]]:
    """The documents of each micro-batch of a step."""
    config = load("sft", [*tuning.options, f"run.dir={folder}"])
    mixture = open_data(config).mixture
    windows = mixture.sources[0].windows
    loader = BatchLoader(mixture, global_batch=4, micro_batch=1)
    found = []
    for batch in loader.step(step):
        _, (window,) = mixture.locate(batch.sample_ids_B.numpy())
        parts = [part for span in windows.spans(int(window)) for part in windows.stream.parts(*span)]
        found.append([document for document, _, _ in parts])
    loader.close()
    return found


def test_the_loss_over_answers_is_that_of_transformers(tuning: Tuning, tmp_path: Path, capsys) -> None:
    assert launch(load("sft", [*tuning.options, f"run.dir={tmp_path / 'run'}", "run.steps=1"]), "sft", 1) == 0
    said = capsys.readouterr().out
    assert "beginning with the weights of" in said and " packed into " in said
    assert "cut because they are longer than 64 tokens" in said
    (row,) = read_rows(tmp_path / "run/metrics.jsonl")
    nats, count = their_loss(tuning, [document for each in documents_of(tuning, tmp_path, 0) for document in each])
    assert abs(row["loss"] - nats / count) <= LOSS_FP32 * abs(row["loss"])


def test_some_micro_batches_have_no_answer(tuning: Tuning, tmp_path: Path) -> None:
    """Or the tests of grids would show less than they say."""
    counts = [their_loss(tuning, each)[1] for step in range(3) for each in documents_of(tuning, tmp_path, step)]
    assert 0 in counts and len(set(counts)) > 4


GRIDS = {
    "two data ranks": ("--nproc", "2"),
    "two data ranks, stage 3": ("--nproc", "2", "zero.stage=3"),
    "tensor 2": ("parallel.tensor=2", "parallel.sequence=true"),
    "pipeline 2": ("parallel.pipeline=2",),
    "larger micro-batches": ("batch.micro=4",),
}
FIRST = "two data ranks, stage 3"
OTHERS = (pytest.param(grid, marks=pytest.mark.full) for grid in GRIDS if grid != FIRST)


@pytest.fixture(scope="module")
def alone(tuning: Tuning, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("alone") / "run")
    assert launch(load("sft", [*tuning.options, f"run.dir={folder.path}"]), "sft", 1) == 0
    return folder


@pytest.mark.parametrize(
    "grid", [FIRST, *(pytest.param(grid, marks=pytest.mark.full) for grid in GRIDS if grid != FIRST)]
)
def test_every_grid_trains_the_same(tuning: Tuning, alone: RunFolder, tmp_path: Path, grid: str) -> None:
    options = (*tuning.options, f"run.dir={tmp_path / 'run'}", *GRIDS[grid])
    done = command("train.py", "--config", CONFIGS / "sft.yaml", *options)
    assert (done.returncode, done.stderr) == (0, "")
    rows, expected = read_rows(tmp_path / "run/metrics.jsonl"), read_rows(alone.metrics)
    assert difference([rows[0]["grad_norm"]], [expected[0]["grad_norm"]]) <= GRADIENT_FP32
    assert difference([row["loss"] for row in rows], [row["loss"] for row in expected]) <= LOSS_FP32
    assert abs(rows[-1]["valid_loss"] - expected[-1]["valid_loss"]) <= 1e-5
    different = weight_differences(
        saved_weights(RunFolder(tmp_path / "run")), saved_weights(alone), heads=6, kv_heads=2
    )
    assert max(different.values()) <= WEIGHTS_FP32


def test_which_documents_a_step_saw(tuning: Tuning, alone: RunFolder, tmp_path: Path, capsys) -> None:
    assert main(["data", "--run", str(alone.path), "--step", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = [document for each in documents_of(tuning, tmp_path, 1) for document in each]
    assert [part["document"] for part in found] == expected and all(part["offset"] == 0 for part in found)


def test_a_run_without_packing_is_another(tuning: Tuning, alone: RunFolder) -> None:
    options = [*tuning.options, f"run.dir={alone.path}", "checkpoint.resume=auto", "checkpoint.load=all"]
    with pytest.raises(UserError, match=r"MZ-412 .*data.pack True -> False"):
        launch(load("sft", [*options, "data.pack=false"]), "sft", 1)


def test_a_mask_that_is_gone_is_one_line(tuning: Tuning, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"x{suffix}").write_bytes(Path(f"{tuning.data}{suffix}").read_bytes())
    line = (
        "train.py",
        "--config",
        "sft",
        *tuning.options,
        f"run.dir={tmp_path / 'run'}",
        f"data.train={tmp_path / 'x'}",
    )
    done = command(*line)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and not (tmp_path / "run/metrics.jsonl").exists()
    assert f"MZ-225 {tmp_path / 'x'}.mask: is missing, but x.json names it" in done.stderr
