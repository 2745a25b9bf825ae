"""Every option does something: a run with another value can be told apart.

The table has a row for each option, so an option that nobody reads cannot be added.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.config.flat import option_keys
from megazero.observe.jsonl import read_rows
from megazero.run.folder import RunFolder
from megazero.tools.certify.tolerances import LOSS_FP32, WEIGHTS_FP32, difference, weight_differences
from tests.tiny_run import Outcome, TinyData, all_tokens, built, command, saved_weights, train

FULL = pytest.mark.full


def losses(outcome: Outcome) -> Any:
    return outcome.column("loss")


def rates(outcome: Outcome) -> Any:
    return outcome.column("lr")


def steps(outcome: Outcome) -> Any:
    return outcome.column("step")


def valid_losses(outcome: Outcome) -> Any:
    return [(row["step"], row["valid_loss"]) for row in outcome.rows if "valid_loss" in row]


def shapes(outcome: Outcome) -> Any:
    return {name: tuple(tensor.shape) for name, tensor in outcome.weights().items()}


def biggest_weight(outcome: Outcome) -> Any:
    weights: list[Tensor] = list(outcome.weights().values())
    return [float(weight.abs().max()) for weight in weights]


def bits_per_byte(outcome: Outcome) -> Any:
    return outcome.trainer.scores.get("valid_bits_per_byte")


def files(outcome: Outcome) -> Any:
    """Names in the run folder, those with a time or a machine in them by their beginning."""
    paths = outcome.folder.path.rglob("*")
    return {(path.parent.name, path.name.split(".")[0]) for path in paths if path.is_file()}


def held(outcome: Outcome) -> Any:
    return outcome.trainer.engine.grid.comm.ledger.bytes_as_dict()


def folder(outcome: Outcome) -> Any:
    return outcome.folder.path.name if outcome.folder.metrics.exists() else None


@dataclass(frozen=True)
class Works:
    """With `value`, `observed` differs from what it is without; both runs also have the options of `beside`."""

    value: str
    observed: Callable[[Outcome], Any]
    beside: tuple[str, ...] = ()


ROTARY, VALID = ("model.position=rotary",), ("data.valid=0.1",)
ROWS: dict[str, Works] = {
    "run.dir": Works("{tmp}/elsewhere", folder),
    "run.steps": Works("2", steps),
    "run.seed": Works("1", losses),
    # run.time_limit: tests/train/test_stopping.py
    # run.deterministic: test_deterministic_changes_nothing_on_a_cpu
    "model.layers": Works("1", shapes),
    "model.hidden": Works("48", shapes),
    "model.heads": Works("2", losses),
    "model.kv_heads": Works("2", shapes),
    "model.ffn": Works("100", shapes),
    "model.vocab": Works("416", shapes),
    "model.seq_len": Works("16", shapes),
    "model.position": Works("rotary", shapes),
    "model.norm": Works("rmsnorm", shapes),
    "model.activation": Works("swiglu", shapes),
    "model.dropout": Works("0.5", losses),
    "model.tie_embeddings": Works("false", shapes),
    "model.norm_eps": Works("0.1", losses),
    "model.qk_norm": Works("head", shapes),
    "model.rope_theta": Works("3.0", losses, ROTARY),
    "model.head_dim": Works("24", shapes),
    "model.norm_place": Works("post", shapes),
    "model.norm_bias": Works("false", shapes),
    "model.norm_offset": Works("1", biggest_weight, ("optimizer.weight_decay=0",)),
    "model.norm_cast": Works("after", losses, ("model.norm=rmsnorm", "precision.dtype=bf16")),
    "model.residual": Works("parallel", losses),
    "model.bias.qkv": Works("false", shapes),
    "model.bias.out": Works("false", shapes),
    "model.bias.mlp": Works("false", shapes),
    "model.layer_kinds": Works("{{local: {{window: 3}}}}", losses),
    "model.layer_pattern": Works("[local, full]", losses, ("model.layer_kinds={full: {}, local: {window: 3}}",)),
    "model.qk_norm_at": Works("after", losses, (*ROTARY, "model.qk_norm=head", "optimizer.lr=0.01")),
    "model.query_scale": Works("{{beta: 1.0, original: 4}}", losses),
    "model.attention_scale": Works("2.0", losses),
    "model.embedding_scale": Works("9.0", losses),
    "model.residual_scale": Works("0.1", losses),
    "model.logit_scale": Works("0.1", losses),
    "model.softcap.attention": Works("0.1", losses),
    "model.softcap.logits": Works("0.1", losses),
    "model.init_std": Works("0.05", losses),
    "model.init_depth": Works("false", losses),
    "model.z_loss": Works("0.1", losses),
    # model.loss_chunk: test_loss_chunk
    # parallel.tensor: test_tensor
    # parallel.pipeline, pipeline.schedule, pipeline.chunks: test_pipeline
    # parallel.sequence: test_sequence_without_tensor_is_the_identity
    # parallel.tensor_chunks: test_tensor
    # parallel.timeout: tests/launcher/test_faults.py
    # parallel.start_timeout: tests/launcher/test_roll_call.py
    # zero.stage: test_stages
    "zero.grad_dtype": Works("param", held, ("precision.dtype=bf16",)),
    "zero.bucket_mb": Works(
        "0.001", held, ("precision.dtype=bf16", "zero.grad_dtype=param", "precision.kernels=reference")
    ),
    # zero.offload.optimizer, zero.offload.delayed: tests/zero/test_offload.py
    # zero.offload.parameters, zero.offload.path, zero.offload.host_mb: tests/run/test_disks.py
    "memory.offload": Works(
        "nvme", held, ("memory.recompute=full", "memory.partition=true", f"zero.offload.path={gettempdir()}")
    ),
    "memory.recompute": Works("full", held),
    # memory.partition: tests/memory/test_recompute.py; memory.cuda_graphs: tests/memory/test_graphs.py
    "precision.dtype": Works("fp64", losses),
    # precision.kernels: test_kernels
    "optimizer.name": Works("lion", losses),
    "optimizer.muon.momentum": Works("0.5", losses, ("optimizer.name=muon",)),
    "optimizer.muon.nesterov": Works("false", losses, ("optimizer.name=muon",)),
    "optimizer.muon.steps": Works("2", losses, ("optimizer.name=muon",)),
    "optimizer.muon.scale": Works("spectral", losses, ("optimizer.name=muon",)),
    "optimizer.muon.lr_factor": Works("2.0", losses, ("optimizer.name=muon",)),
    "optimizer.moments": Works("bf16", held),
    "precision.masters": Works("none", held, ("precision.dtype=bf16",)),
    "optimizer.average.kind": Works("ema", held),
    "optimizer.clip_value": Works("0.0001", losses, ("optimizer.eps=0.001",)),
    "optimizer.groups": Works('[{{match: "*qkv*", lr_factor: 0.0}}]', losses),
    "optimizer.lr": Works("0.01", losses),
    "optimizer.betas": Works("[0.5, 0.5]", losses),
    "optimizer.eps": Works("0.01", losses),
    "optimizer.weight_decay": Works("50.0", biggest_weight),
    "optimizer.clip": Works("0.0001", losses, ("optimizer.eps=0.001",)),  # without eps Adam is blind to scale
    "schedule.warmup": Works("4", rates),
    "schedule.warmup_tokens": Works("512", rates),
    "schedule.decay": Works("constant", rates),
    "schedule.points": Works("[[0, 1.0], [4, 0.5]]", rates, ("schedule.decay=piecewise", "schedule.points=[[0, 1.0]]")),
    "schedule.min_lr": Works("0.001", rates),
    "schedule.cooldown": Works("2", rates, ("schedule.decay=wsd",)),
    "schedule.steps": Works("3", rates),
    "batch.global": Works("8", lambda outcome: outcome.column("tokens")),
    # batch.micro: test_micro_batches_are_cut_as_asked
    "data.train": Works("{train}", losses, ("data.valid=null",)),
    # data.sources, data.max_epochs: tests/run/test_sources.py
    # data.validation: tests/run/test_validation_sets.py
    "data.valid": Works("0.5", valid_losses),
    "data.valid_every": Works("2", valid_losses, VALID),
    "data.valid_samples": Works("3", valid_losses, VALID),
    "data.tokenizer": Works("null", bits_per_byte, VALID),
    "data.mask_eod": Works("true", losses),
    "data.pack": Works("true", losses, ("data.mask_eod=true",)),
    "checkpoint.every": Works("2", files),
    "checkpoint.keep": Works("1", files, ("checkpoint.every=2",)),
    # checkpoint.async: tests/checkpoint/test_saving.py; checkpoint.resume: tests/checkpoint/test_resume.py
    # checkpoint.load: tests/checkpoint/test_load.py
    "observe.every": Works("3", steps),
    "observe.wandb": Works("project", files),
    "observe.tensorboard": Works("true", files),
    "observe.profile": Works("2", files),
}
OTHERWISE = {
    "parallel.pipeline",
    "pipeline.schedule",
    "pipeline.chunks",
    "zero.stage",
    "zero.shard_ranks",  # tests/zero/test_hybrid.py
    "zero.reduce_dtype",  # tests/zero/test_reduce_dtype.py
    "zero.secondary_ranks",  # tests/zero/test_secondary.py
    "zero.quantize.parameters",  # tests/zero/test_quantize.py
    "zero.quantize.gradients",  # the same
    "zero.quantize.error_feedback",  # tests/zero/test_error_feedback.py
    "model.loss_chunk",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.tensor_chunks",
    "parallel.timeout",
    "parallel.start_timeout",
    "precision.kernels",
    "batch.micro",
    "memory.partition",
    "memory.cuda_graphs",
    "optimizer.average.decay",  # tests/optim/test_averages.py
    "optimizer.average.for_validation",  # the same
    "run.on_spike",  # tests/train/test_spikes.py
    "run.spike_factor",  # the same
    "observe.check_replicas",  # tests/run/test_replicas.py
    "observe.evaluate.every",  # tests/evaluation/test_during.py
    "observe.evaluate.texts",  # the same
    "observe.evaluate.tasks",  # the same
    "observe.evaluate.samples",  # the same
    "zero.offload.optimizer",
    "zero.offload.parameters",
    "zero.offload.path",
    "zero.offload.host_mb",
    "zero.offload.delayed",
    "data.sources",
    "stages",  # tests/run/test_stages.py
    "data.max_epochs",
    "data.validation",
    "run.time_limit",
    "run.deterministic",
    "checkpoint.async",
    "checkpoint.resume",
    "checkpoint.load",
}


@pytest.fixture(scope="module")
def reference(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """The run without the option, once for each set of options beside it."""
    made: dict[tuple[str, ...], Outcome] = {}

    def find(beside: tuple[str, ...]) -> Outcome:
        if beside not in made:
            made[beside] = train(tiny_data.load(tmp_path_factory.mktemp("reference") / "run", *beside))
        return made[beside]

    return find


def test_every_option_has_a_row():
    assert sorted([*ROWS, *OTHERWISE]) == sorted(option_keys())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
@pytest.mark.parametrize("option", ROWS)
def test_option_works(option: str, tiny_data: TinyData, reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = ROWS[option]
    if option == "observe.tensorboard":
        pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_MODE", "offline")
    value = row.value.format(tmp=tmp_path, train=_other_data(tiny_data, tmp_path))
    config = tiny_data.load(tmp_path / "run", *row.beside, f"{option}={value}")
    changed, plain = row.observed(train(config)), row.observed(reference(row.beside))
    assert changed != plain
    for numbers in (changed, plain):  # numbers differ because the option acts, not because nan is never equal
        if isinstance(numbers, list) and numbers and isinstance(numbers[0], float):
            assert all(math.isfinite(number) for number in numbers)


def _other_data(tiny_data: TinyData, folder: Path) -> Path:
    """The same tokens without their first thousand."""
    import numpy as np

    from megazero.data.indexed_dataset import IndexedDatasetWriter

    with IndexedDatasetWriter(folder / "other", np.uint16) as writer:
        writer.append(all_tokens(tiny_data.train)[1000:])
        writer.end_document()
    return folder / "other"


def test_sequence_without_tensor_is_the_identity(tiny_data: TinyData, reference, tmp_path: Path):
    changed, plain = train(tiny_data.load(tmp_path, "parallel.sequence=true")), reference(())
    for key in ("loss", "grad_norm", "lr"):
        assert changed.column(key) == plain.column(key)
    assert valid_losses(changed) == valid_losses(plain)


@pytest.mark.parametrize("chunks", [1, 3])
def test_tensor(tiny_data: TinyData, reference, tmp_path: Path, chunks: int):
    """Two ranks, each with half of every matrix, train the same model."""
    options = (f"run.dir={tmp_path / 'run'}", "parallel.tensor=2", f"parallel.tensor_chunks={chunks}")
    done = command("train.py", "--config", tiny_data.config, *options)
    assert (done.returncode, done.stderr) == (0, "") and "on 2 cpu ranks (tensor 2)" in done.stdout
    (mine, theirs), rows = json.loads((tmp_path / "run/ledger.json").read_text()), reference(()).rows
    sent = mine["traffic"]["tensor"]
    assert mine["traffic"] == theirs["traffic"]
    assert sent["block forward"]["ops"] >= chunks * sent["block backward"]["ops"] > 0
    saved = saved_weights(RunFolder(tmp_path / "run"))
    different = weight_differences(saved, reference(()).weights(), heads=4, kv_heads=4)
    assert max(different.values()) <= WEIGHTS_FP32
    found = read_rows(tmp_path / "run/metrics.jsonl")
    assert difference([row["loss"] for row in found], [row["loss"] for row in rows]) <= LOSS_FP32
    assert all(row["comm_bytes"] > 0 for row in found) and not any(row["comm_bytes"] for row in rows)


def test_loss_chunk(tiny_data: TinyData, reference, tmp_path: Path):
    """Logits of seven tokens at a time train as those of all."""
    outcome, whole = train(tiny_data.load(tmp_path / "run", "model.loss_chunk=7")), reference(())
    assert difference(losses(outcome), losses(whole)) <= LOSS_FP32
    different = weight_differences(outcome.weights(), whole.weights(), heads=4, kv_heads=4)
    assert 0 < max(different.values()) <= WEIGHTS_FP32


@pytest.mark.parametrize(
    "options",
    [("1f1b", 1, 2), pytest.param(("interleaved", 2, 2), marks=FULL), pytest.param(("zb-v", 2, 3), marks=FULL)],
    ids=lambda o: o[0],
)
def test_pipeline(tiny_data: TinyData, tmp_path: Path, options: tuple[str, int, int]):
    """Stages on ranks of their own train the model of one process, bit for bit where no weight is shared."""
    schedule, chunks, stage = options
    common = ("model.layers=4", "model.tie_embeddings=false", "model.dropout=0.1", "data.valid=0.1")
    alone = train(tiny_data.load(tmp_path / "alone", *common))
    cut = ("parallel.pipeline=2", f"pipeline.schedule={schedule}", f"pipeline.chunks={chunks}", f"zero.stage={stage}")
    where = f"run.dir={tmp_path / 'run'}"
    done = command("train.py", "--config", tiny_data.config, where, "--nproc", "4", "batch.micro=1", *common, *cut)
    assert (done.returncode, done.stderr) == (0, "") and "on 4 cpu ranks (pipeline 2 x data 2)" in done.stdout
    done = command("train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'two'}", *common, *cut)
    assert (done.returncode, done.stderr) == (0, "")
    ledger = json.loads((tmp_path / "two/ledger.json").read_text())
    boundaries = 2 * chunks - 1 - (schedule == "zb-v")
    sent = [ledger[rank]["traffic"]["pipeline"] for rank in (0, 1)]
    assert sum(one.get("gradients", {"ops": 0})["ops"] for one in sent) == boundaries * 4 * 2  # steps, micro-batches
    for run, bitwise in (("two", True), ("run", False)):
        rows = read_rows(tmp_path / run / "metrics.jsonl")
        saved = saved_weights(RunFolder(tmp_path / run))
        if bitwise:
            assert all(torch.equal(saved[name], value) for name, value in alone.weights().items())
            assert all([row.get(k) for row in rows] == alone.column(k) for k in ("loss", "grad_norm", "lr"))
            assert rows[-1]["valid_loss"] == alone.rows[-1]["valid_loss"]
        else:
            different = weight_differences(saved, alone.weights(), heads=4, kv_heads=4)
            assert max(different.values()) <= WEIGHTS_FP32
            assert difference([row["loss"] for row in rows], alone.column("loss")) <= LOSS_FP32


def test_stages(tiny_data: TinyData, tmp_path: Path):
    """Two ranks in each stage train the same model bit for bit, and hold less from stage to stage."""
    losses, bytes_held, weights = [], [], []
    for stage in range(4):
        run = tmp_path / str(stage)
        options = (f"run.dir={run}", f"zero.stage={stage}", "run.steps=3", "data.valid=0.1")
        done = command("train.py", "--config", tiny_data.config, "--nproc", "2", *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"ZeRO stage {stage} over 2 data ranks, held by this rank between steps:" in done.stdout
        losses.append(
            [(row["loss"], row["grad_norm"], row.get("valid_loss")) for row in read_rows(run / "metrics.jsonl")]
        )
        held = json.loads((run / "ledger.json").read_text())[1]["bytes"]
        bytes_held.append([held[kind]["now"] for kind in ("parameters", "gradients", "optimizer")])
        assert held["activations"]["peak"] > 0 and ("pool" in held) == (stage >= 2)
        weights.append(saved_weights(RunFolder(run)))
    assert losses.count(losses[0]) == 4
    assert all(torch.equal(other[name], value) for other in weights[1:] for name, value in weights[0].items())
    (parameters, _, optimizer), *_ = bytes_held
    assert bytes_held[1:] == [
        [parameters, parameters, optimizer // 2],
        [parameters, parameters // 2, optimizer // 2],
        [parameters // 2, parameters // 2, optimizer // 2],
    ]


def test_kernels(tiny_data: TinyData, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """What is asked for is what the log says; where fused kernels cannot be had, auto says why."""

    def chosen(*options: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="megazero"):
            trainer, _ = built(tiny_data.load(tmp_path / "-".join(options), *options))
        trainer.close()
        return next(record.message for record in caplog.records if record.message.startswith("kernels: "))

    assert chosen("precision.kernels=reference") == "kernels: reference (asked for)"
    assert "asked for" not in chosen("precision.kernels=auto")
    assert chosen("precision.dtype=fp64").startswith(
        "kernels: reference (fused kernels exist for fp32 and 16 bits, not"
    )
    assert "asked for" not in chosen("precision.dtype=bf16")
    with pytest.raises(UserError, match=r"MZ-114 precision.kernels=fused: .*float64"):
        chosen("precision.kernels=fused", "precision.dtype=fp64")
    with pytest.raises(UserError, match=r"MZ-114 precision.kernels=apex: apex has no CPU kernels"):
        chosen("precision.kernels=apex")


def test_micro_batches_are_cut_as_asked(tiny_data: TinyData, tmp_path: Path):
    trainer, _ = built(tiny_data.load(tmp_path, "batch.micro=1"))
    sizes = [batch.tokens_SB.shape[1] for batch in trainer.loader.step(0)]
    trainer.close()
    assert sizes == [1, 1, 1, 1]


def test_deterministic_changes_nothing_on_a_cpu(tiny_data: TinyData, reference, tmp_path: Path):
    changed, plain = train(tiny_data.load(tmp_path / "run", "run.deterministic=true")), reference(())
    for key in ("loss", "grad_norm", "lr", "valid_loss"):
        assert [row.get(key) for row in changed.rows] == [row.get(key) for row in plain.rows]
    assert all(torch.equal(value, changed.weights()[name]) for name, value in plain.weights().items())
    assert not torch.are_deterministic_algorithms_enabled()
