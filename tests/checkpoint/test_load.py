"""What is taken of another run to begin with: its weights, or its moments too; everything else begins anew."""

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megazero.__main__ import main
from megazero.base.errors import FaultList, UserError
from megazero.builders.assemble import build_model
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.store import Store
from megazero.comm.grid import Axis
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.data.batch import MicroBatch
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.model.batch_context import BatchContext
from megazero.observe.jsonl import read_rows
from megazero.run.build import loader_of
from megazero.run.data import open_data
from megazero.run.folder import RunFolder
from megazero.tools.certify.tolerances import LOSS_FP32, LOSS_FP64, WEIGHTS_FP64, difference
from megazero.tools.convert.tensors import filled
from megazero.tools.training.launch import launch
from tests.checkpoint.grids import logical_state
from tests.checkpoint.test_resume import rows, same_step
from tests.tiny_run import TinyData, all_tokens, saved_weights

FP64 = ("precision.dtype=fp64", "model.dropout=0.0")
# Another batch, order, learning rate and decay than the source's; no validation, so other windows too.
OTHER = ("batch.global=8", "run.seed=5", "optimizer.lr=1e-4", "optimizer.weight_decay=0.0", "optimizer.eps=1e-6")
OTHER += ("model.init_std=0.03", "model.init_depth=false")
OTHER += ("run.steps=2", "schedule.min_lr=1e-5", "data.valid=null")
BETAS = (0.9, 0.95)


@pytest.fixture(scope="module")
def sources(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of four steps with some options, once for each."""
    made: dict[tuple[str, ...], Path] = {}

    def find(*options: str) -> Path:
        if options not in made:
            made[options] = tmp_path_factory.mktemp("source") / "run"
            assert launch(tiny_data.load(made[options], *options), "small", 1) == 0
        return made[options]

    return find


@pytest.fixture(scope="module")
def other_data(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("other") / "set"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.append(all_tokens(tiny_data.train)[::-1].copy())
        writer.end_document()
    return f"data.train={prefix}"


def losses(batches: list[MicroBatch], logits: Callable[[Tensor], Tensor]) -> float:
    """The mean over the tokens of a step, from logits [S, B, V] of tokens [S, B]."""
    with torch.no_grad():
        found = [
            functional.cross_entropy(logits(batch.tokens_SB).flatten(0, 1), batch.targets_SB.flatten())
            for batch in batches
        ]
    return torch.stack(found).mean().item()


def first_batch(config: Config) -> list[MicroBatch]:
    data = open_data(config)
    loader = loader_of(data.course.parts[0], data, Axis("data"), torch.device("cpu"))
    try:
        return loader.step(0)
    finally:
        loader.close()


def expected_loss(config: Config, source: Path, dtype: torch.dtype) -> float:
    """Of a run's first batch with the source's weights, by one process, without engine or checkpoint loading."""
    model = filled(build_model(config), saved_weights(RunFolder(source)).pop, dtype)

    def logits(tokens_SB: Tensor) -> Tensor:
        return model(tokens_SB, BatchContext(0, torch.zeros(tokens_SB.shape[1], dtype=torch.int64), training=False))

    return losses(first_batch(config), logits)


def began(folder: Path) -> dict[str, Any]:
    """The first row of a run."""
    return read_rows(RunFolder(folder).metrics)[0]


def progress_of(folder: Path, step: int) -> Progress:
    found = read_manifest(Store(RunFolder(folder).checkpoints).path(step)).progress
    assert found is not None
    return found


FULL = pytest.mark.full
QUICK = (("weights", 2, 3), ("optimizer", 1, 0))


@pytest.mark.parametrize(
    ("what", "ranks", "stage"),
    [
        pytest.param(*case, marks=() if case in QUICK else FULL)
        for case in product(("weights", "optimizer"), (1, 2), (0, 3))
    ],
)
def test_the_first_step_is_of_those_weights(
    tiny_data: TinyData, sources, other_data: str, tmp_path: Path, what: str, ranks: int, stage: int, capfd
) -> None:
    source = sources(*FP64)
    options = (*FP64, *OTHER, other_data, f"zero.stage={stage}", f"checkpoint.resume={source}")
    config = tiny_data.load(tmp_path / "run", *options, f"checkpoint.load={what}")
    assert launch(config, "small", ranks) == 0
    out, err = capfd.readouterr()
    said = "the weights of" if what == "weights" else "weights and moments of"
    assert f"beginning with {said} {source}/checkpoints/step_00000004" in out and err == ""
    found = read_rows(tmp_path / "run/metrics.jsonl")
    assert difference([found[0]["loss"]], [expected_loss(config, source, torch.float64)]) <= LOSS_FP64
    assert [(row["step"], row["samples"], row["lr"]) for row in found] == [(1, 8, 5e-5), (2, 16, 1e-4)]
    assert progress_of(tmp_path / "run", 2) == progress_of(tmp_path / "run", 2).model_copy(
        update={"updates": 2, "skipped": 0, "next_sample": 16, "carried": 0 if what == "weights" else 4}
    )
    assert Store(source / "checkpoints").steps() == [4] and began(source)["step"] == 1


@pytest.mark.parametrize("what", ["weights", "optimizer"])
def test_the_first_update_is_adam_s(tiny_data: TinyData, sources, tmp_path: Path, what: str, capsys) -> None:
    """With moments at zero and a count of 1, or with theirs and a count of 5: Kingma and Ba, algorithm 1."""
    source = sources(*FP64)
    options = (*FP64, *OTHER, "run.steps=1", "schedule.warmup=1", f"checkpoint.resume={source}")
    assert launch(tiny_data.load(tmp_path / "run", *options, f"checkpoint.load={what}"), "small", 1) == 0
    (_, before), (_, after) = logical_state(source), logical_state(tmp_path / "run")
    count, (beta1, beta2) = (1 if what == "weights" else 5), BETAS
    for name, kinds in after.items():
        old = before[name] if what == "optimizer" else {**before[name], "exp_avg": 0.0, "exp_avg_sq": 0.0}
        gradient = (kinds["exp_avg"] - beta1 * old["exp_avg"]) / (1 - beta1)
        second = beta2 * old["exp_avg_sq"] + (1 - beta2) * gradient**2
        assert torch.allclose(kinds["exp_avg_sq"], second, rtol=1e-9, atol=1e-18), name
        step = kinds["exp_avg"] / (1 - beta1**count) / ((second / (1 - beta2**count)).sqrt() + 1e-6)
        assert difference(kinds["weight"], old["weight"] - 1e-4 * step) <= WEIGHTS_FP64, name


def test_the_count_of_moments_goes_from_run_to_run(tiny_data: TinyData, sources, tmp_path: Path, capsys) -> None:
    source = sources(*FP64)
    for name, begin, carried in (("one", source, 4), ("two", tmp_path / "one", 6), ("on", tmp_path / "two", 6)):
        what, steps = ("all", 3) if name == "on" else ("optimizer", 2)
        options = (*FP64, *OTHER, f"checkpoint.resume={begin}", f"checkpoint.load={what}")
        assert launch(tiny_data.load(tmp_path / name, *options, f"run.steps={steps}"), "small", 1) == 0
        found = progress_of(tmp_path / name, steps)
        assert (found.carried, found.updates, found.moments_age) == (carried, steps, carried + steps)
    assert b"carried" not in Store(source / "checkpoints").path(4).joinpath("manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("what", "left"),
    [
        pytest.param(*case, marks=() if case in (("weights", 1), ("optimizer", 3), ("optimizer", 0)) else FULL)
        for case in product(("weights", "optimizer"), (0, 1, 3))
    ],
)
def test_killed_and_started_again_it_is_the_run_without_that(
    tiny_data: TinyData, sources, tmp_path: Path, what: str, left: int, capsys
) -> None:
    """The same line, again: it goes on from its own newest step with everything; from the source where it has none."""
    line = (*FP64[:1], *OTHER, "model.dropout=0.1", "run.steps=4", "checkpoint.every=1", "data.valid=0.2")
    line += (f"checkpoint.resume={sources(*FP64[:1], 'model.dropout=0.1')}", f"checkpoint.load={what}")
    assert launch(tiny_data.load(tmp_path / "whole", *line), "small", 1) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in range(left + 1, 5):
        shutil.rmtree(Store(tmp_path / "run/checkpoints").path(step))
    capsys.readouterr()
    assert launch(tiny_data.load(tmp_path / "run", *line), "small", 1) == 0
    out = capsys.readouterr().out
    assert (f"going on from {tmp_path}/run/checkpoints" in out) == (left > 0)
    assert ("beginning with" in out) == (left == 0)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    for step in range(max(left, 1), 5):
        a, b = (Store(tmp_path / name / "checkpoints").path(step) for name in ("run", "whole"))
        assert (a / "shard_00000.safetensors").read_bytes() == (b / "shard_00000.safetensors").read_bytes()
    if left:
        same_step(tmp_path / "whole", tmp_path / "run", 4)


def test_its_own_config_goes_on(tiny_data: TinyData, sources, tmp_path: Path, capsys) -> None:
    """config.yaml says where it began; with `auto` it is its own newest step, with everything."""
    options = (*FP64, *OTHER, f"checkpoint.resume={sources(*FP64)}", "checkpoint.load=weights")
    assert launch(tiny_data.load(tmp_path / "run", *options), "small", 1) == 0
    again = load(str(tmp_path / "run/config.yaml"), ["checkpoint.resume=auto", "run.steps=3"])
    assert launch(again, "small", 1) == 0
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((), ("precision.dtype=fp64",)),
        ((), ("precision.dtype=bf16",)),
        (("precision.dtype=bf16",), ()),
        (("model.position=rotary",), ("model.position=rotary", "model.seq_len=64")),
        (("model.dropout=0.2",), ("data.mask_eod=true",)),
    ],
    ids=["wider", "16 bits", "from 16 bits", "longer", "masked"],
)
def test_what_may_be_another(tiny_data: TinyData, sources, tmp_path: Path, theirs, ours, capsys) -> None:
    """Weights rest in fp32 or fp64: fp32 goes over into all of them without rounding."""
    source = sources(*theirs)
    for what in ("weights", "optimizer"):
        options = (*ours, *OTHER, f"checkpoint.resume={source}", f"checkpoint.load={what}", "run.steps=1")
        config = tiny_data.load(tmp_path / what, *options, "schedule.warmup=1")
        assert launch(config, "small", 1) == 0
        if "data.mask_eod=true" not in ours and "precision.dtype=bf16" not in ours:
            loss = expected_loss(config, source, torch.float64)
            assert difference([began(tmp_path / what)["loss"]], [loss]) <= LOSS_FP32


def test_an_import_in_another_length_and_precision(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """The first loss is transformers' own."""
    import transformers

    generator = torch.Generator().manual_seed(3)
    shape = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, intermediate_size=100, vocab_size=400, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.dim() == 1) * 0.5)
    model.save_pretrained(tmp_path / "theirs")
    out = tmp_path / "imported"
    assert main(["import", "--from", "hf", "--model", str(tmp_path / "theirs"), "--out", str(out)]) == 0
    options = [f"data.train={tiny_data.train}", "run.steps=2", "batch.global=4", "model.seq_len=16"]
    options += ["batch.micro=4", "observe.every=1"]
    options += [
        "precision.dtype=fp64",
        "schedule.warmup=1",
        f"checkpoint.resume={out}",
        f"run.dir={tmp_path / 'run'}",
    ]
    config = load(str(out / "config.yaml"), [*options, "checkpoint.load=weights"])
    assert launch(config, "imported", 1) == 0
    model = model.double().eval()
    loss = losses(first_batch(config), lambda tokens_SB: model(tokens_SB.T).logits.transpose(0, 1))
    assert difference([began(tmp_path / "run")["loss"]], [loss]) <= LOSS_FP32  # transformers' rotary angles are fp32
    refuse(load(str(out / "config.yaml"), [*options, "checkpoint.load=optimizer", f"run.dir={tmp_path / 'no'}"]), 412)


def test_in_the_folder_of_the_import_itself_it_can_be_repeated(tiny_data: TinyData, sources, tmp_path: Path) -> None:
    """Begun at step 0 of its own folder, then gone on; what has been trained there is not begun anew."""
    from tests.tools.test_convert import gpt2

    gpt2().save_pretrained(tmp_path / "theirs")
    run = tmp_path / "runs/mine"
    assert main(["import", "--from", "hf", "--model", str(tmp_path / "theirs"), "--out", str(run)]) == 0
    options = [f"data.train={tiny_data.train}", "schedule.warmup=1", "batch.global=4", f"run.dir={run}"]
    line = [*options, f"checkpoint.resume={run}", "checkpoint.load=weights", "schedule.decay=constant"]
    for steps in (1, 2):
        assert launch(load(str(run / "config.yaml"), [*line, f"run.steps={steps}", "observe.every=1"]), "mine", 1) == 0
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2]
    refuse(load(str(run / "config.yaml"), [*line, "checkpoint.load=optimizer", "run.steps=3"]), 413)


def refuse(config: Config, code: int) -> str:
    with pytest.raises(UserError, match=f"MZ-{code}") as caught:
        launch(config, "small", 1)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "changes", "line"),
    [
        ("weights", ("model.hidden=48",), "does not fit this model (saved -> this): model.hidden 40 -> 48"),
        ("weights", ("model.seq_len=16",), "model.seq_len 32 -> 16"),
        ("weights", ("precision.dtype=fp32",), "dtype F64 -> F32"),
        ("optimizer", ("optimizer.betas=[0.9,0.99]",), "optimizer.betas [0.9, 0.95] -> [0.9, 0.99]"),
        ("optimizer", ("precision.dtype=bf16",), "dtype F64 -> F32"),
    ],
)
def test_what_must_be_the_same(tiny_data: TinyData, sources, tmp_path: Path, what: str, changes, line: str) -> None:
    options = (*FP64, *OTHER, f"checkpoint.resume={sources(*FP64)}", f"checkpoint.load={what}", *changes)
    assert line in refuse(tiny_data.load(tmp_path / "run", *options), 412)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_wrong_uses(tiny_data: TinyData, sources, tmp_path: Path) -> None:
    source = sources(*FP64)
    own = Path(shutil.copytree(source, tmp_path / "own"))
    for where in (own, Store(own / "checkpoints").path(4), "auto"):
        config = tiny_data.load(own, *FP64, f"checkpoint.resume={where}", "checkpoint.load=weights", "run.steps=9")
        if where != "auto":
            assert "holds step 4, but checkpoint.load=weights would begin the run again" in refuse(config, 413)
    nowhere = tiny_data.load(tmp_path / "new", "checkpoint.resume=auto", "checkpoint.load=optimizer")
    assert "no checkpoint is saved here yet for checkpoint.load=optimizer" in refuse(nowhere, 402)
    for given, code in (("weights", 106), ("moments", 105)):
        with pytest.raises(FaultList, match=f"MZ-{code} .*checkpoint.load"):
            tiny_data.load(tmp_path / "new", f"checkpoint.load={given}")


def test_another_tokenizer_is_said(tiny_data: TinyData, sources, tmp_path: Path, capsys) -> None:
    from data_tools import preprocess, train_tokenizer

    corpus = tiny_data.train.parent / "corpus.jsonl"
    make = ["--input", str(corpus), "--output", str(tmp_path / "another.model"), "--vocab", "390"]
    assert train_tokenizer.main(make) == 0
    another = ["--tokenizer", str(tmp_path / "another.model")]
    assert preprocess.main(["--input", str(corpus), "--output", str(tmp_path / "train"), *another]) == 0
    options = (*FP64, *OTHER, f"checkpoint.resume={sources(*FP64)}", "checkpoint.load=weights", "data.valid=null")
    options += (f"data.train={tmp_path / 'train'}", f"data.tokenizer={tmp_path / 'another.model'}")
    config = tiny_data.load(tmp_path / "run", *options)
    capsys.readouterr()
    assert launch(config, "small", 1) == 0
    assert "its tokenizer differs from data.tokenizer" in capsys.readouterr().err
