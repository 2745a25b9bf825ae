"""transformers' models in and out: equal logits both ways, equal bits round the circle."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import megazero
from megazero.__main__ import main
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.config.flat import dump
from megazero.data.tokenizer import open_tokenizer
from megazero.observe.jsonl import read_rows
from megazero.plan.job import Job
from megazero.run.folder import RunFolder
from megazero.zero.placement import Precision
from tests.byte_level import byte_level_bpe
from tests.checkpoint.grids import save_after
from tests.layouts import SHAPES, config_of, job_on
from tests.ranks import run_ranks
from tests.tiny_run import TinyData, command

LOGITS = 2e-5  # fp32 through a few layers, in two orders of addition; logits are of the order of 1


def gpt2(**changes: Any) -> "transformers.GPT2LMHeadModel":
    options = {"n_layer": 2, "n_embd": 40, "n_head": 4, "vocab_size": 400, "n_positions": 32} | changes
    return _random(transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)))


def llama(**changes: Any) -> "transformers.LlamaForCausalLM":
    options = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    options |= {"intermediate_size": 100, "vocab_size": 400, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
    return _random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**(options | changes))))


def _random(model: Any) -> Any:
    """Also what transformers initialises with constants: biases and norms."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.dim() == 1) * 0.5)
    return model.eval()


MODELS = {
    "gpt2": gpt2,
    "gpt2-untied-wide": lambda: gpt2(tie_word_embeddings=False, n_inner=96, layer_norm_epsilon=1e-3),
    "llama": llama,
    "llama-tied-theta": lambda: llama(tie_word_embeddings=True, rope_theta=500.0),
    "llama-mha": lambda: llama(num_key_value_heads=6),
}
TOKENS_BS = torch.randint(400, (3, 32), generator=torch.Generator().manual_seed(1))


def ours(run: RunFolder, tokens_BS: Tensor) -> Tensor:
    """Logits [B, S, V] of a run's newest weights."""
    return megazero.load(run.path, torch.float32).logits(tokens_BS)


def theirs(folder: Path, tokens_BS: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return model(tokens_BS).logits


def line_of(folder: Path) -> list[str]:
    """The command line that imports `theirs` in a folder as its `run`."""
    return ["import", "--from", "hf", "--model", str(folder / "theirs"), "--out", str(folder / "run")]


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of the config.json of `theirs`; None takes one away."""
    path = folder / "theirs/config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
@pytest.mark.parametrize("name", MODELS)
def test_in_and_out_again(tmp_path: Path, name: str, shards: str, capsys) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > (shards == "20KB")
    run = RunFolder(tmp_path / "run")
    assert main(line_of(tmp_path)) == 0
    with torch.no_grad():
        expected = model(TOKENS_BS).logits
    assert (ours(run, TOKENS_BS) - expected).abs().max() <= LOGITS
    again = tmp_path / "again"
    part = ("--part-mb", "1") if shards == "20KB" else ()
    assert main(["export", "--to", "hf", "--run", str(run.path), "--out", str(again), *part]) == 0
    assert torch.equal(theirs(again, TOKENS_BS), expected)
    before, after = tensors(tmp_path / "theirs"), tensors(again)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert "step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flavour", "layout"),
    [
        ("deep", job_on(tensor=2, pipeline=2, accumulation=4)),
        *(
            pytest.param(flavour, layout, marks=pytest.mark.full)
            for flavour in ("deep", "llama")
            for layout in (job_on(accumulation=4), job_on(tensor=2, pipeline=2, data=2, accumulation=4, stage=3))
        ),
    ],
)
def test_out_of_any_grid(tmp_path: Path, flavour: str, layout: Job, capsys) -> None:
    """Trained weights, from one rank or eight."""
    run = RunFolder(tmp_path / "run")
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    run_ranks(layout.ranks, save_after, layout, flavour, Precision(), run.path, 2, **axes)
    dump(config_of(layout, SHAPES[flavour], Precision()), run.config)
    assert main(["export", "--to", "hf", "--run", str(run.path), "--out", str(tmp_path / "out")]) == 0
    tokens_BS = TOKENS_BS[:, : SHAPES[flavour].seq_len] % SHAPES[flavour].vocab
    assert (theirs(tmp_path / "out", tokens_BS) - ours(run, tokens_BS)).abs().max() <= LOGITS


def test_parts_of_a_large_model(tmp_path: Path, capsys) -> None:
    model = gpt2(n_embd=160, n_layer=4)
    model.save_pretrained(tmp_path / "theirs")
    main(line_of(tmp_path))
    line = ["export", "--to", "hf", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--part-mb", "1"]
    assert main(line) == 0
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    assert torch.equal(theirs(tmp_path / "out", TOKENS_BS), theirs(tmp_path / "theirs", TOKENS_BS))


def test_published_gpt2_has_no_prefix_and_a_mask(tmp_path: Path, capsys) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    plain = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    save_file(plain | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}, path)
    assert main(["import", "--from", "hf", "--model", str(path.parent), "--out", str(tmp_path / "run")]) == 0
    assert (ours(RunFolder(tmp_path / "run"), TOKENS_BS) - gpt2()(TOKENS_BS).logits).abs().max() <= LOGITS


def test_training_goes_on_from_what_was_imported(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """On any grid, from its weights, with fresh moments, and in either folder."""
    gpt2().save_pretrained(tmp_path / "theirs")
    run = tmp_path / "imported"
    assert main(["import", "--from", "hf", "--model", str(tmp_path / "theirs"), "--out", str(run)]) == 0
    options = (f"data.train={tiny_data.train}", "run.steps=3", "batch.global=4", "model.dropout=0.0", "observe.every=1")
    options += ("schedule.warmup=1",)
    line = ("train.py", "--config", run / "config.yaml", *options, f"checkpoint.resume={run}")
    losses = {}
    for name, grid in (("one", ()), ("four", ("parallel.tensor=2", "parallel.pipeline=2", "zero.stage=3"))):
        done = command(*line, f"run.dir={tmp_path / name}", *grid)
        assert (done.returncode, done.stderr) == (
            0,
            "",
        ) and f"beginning with the weights of {run}/checkpoints/step_00000000" in done.stdout
        losses[name] = [row["loss"] for row in read_rows(tmp_path / name / "metrics.jsonl")]
    assert losses["one"] == pytest.approx(losses["four"], rel=2e-6)
    fresh = command(*line[:-1], f"run.dir={tmp_path / 'fresh'}")
    assert fresh.returncode == 0
    assert read_rows(tmp_path / "fresh/metrics.jsonl")[0]["loss"] != losses["one"][0]
    own = command(*line[:-1], f"run.dir={run}", "checkpoint.resume=auto")
    assert own.returncode == 0 and [row["loss"] for row in read_rows(run / "metrics.jsonl")] == losses["one"]


def refused(capsys, code: int, *line: object) -> str:
    capsys.readouterr()  # what transformers has said
    assert main([str(word) for word in line]) != 0
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"MZ-{code}") and err.count("\n") == 1 and len(err) <= 301
    return err


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "bert"}, "model_type 'bert'"),
        ({"model_type": ["gpt2"]}, "model_type ['gpt2']"),
        ({"activation_function": "relu"}, "activation_function relu: our models have gelu_new"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"n_layer": None}, "n_layer is missing"),
        ({"n_layer": 0}, "n_layer: Input should be greater than or equal to 1, got 0"),
        ({"n_layer": 2.0}, "n_layer: Input should be a valid integer, got 2.0"),
        ({"n_layer": 10**30}, "n_layer: Input should be less than or equal to 4096"),
        ({"n_layer": True}, "n_layer: Input should be a valid integer, got True"),
        ({"n_embd": "40"}, "n_embd: Input should be a valid integer, got '40'"),
        ({"n_head": [4]}, "n_head: Input should be a valid integer, got [4]"),
        ({"n_head": 3}, "model.hidden % model.heads == 0 with model.head_dim null is broken"),
        ({"n_inner": -1}, "n_inner: Input should be greater than or equal to 1"),
        ({"resid_pdrop": 0.0}, "embd_pdrop 0.1 and resid_pdrop 0.0: our models have one value there, model.dropout"),
        ({"resid_pdrop": 1.0, "embd_pdrop": 1.0}, "resid_pdrop: Input should be less than 1"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon: Input should be greater than 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: Input should be a valid boolean"),
        ({"add_cross_attention": {}}, "add_cross_attention {}: our models have False"),
        ({"activation_function": "relu"}, "import a gpt2 model with activation_function gelu_new"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
    ],
)
def test_a_model_that_is_none_of_ours(tmp_path: Path, capsys, changes: dict[str, Any], what: str) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    edit(tmp_path, **changes)
    assert what in refused(capsys, 415, *line_of(tmp_path))
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_read(tmp_path: Path, capsys) -> None:
    line = line_of(tmp_path)
    assert "config.json: cannot be read" in refused(capsys, 414, *line)
    gpt2(n_layer=1).save_pretrained(tmp_path / "theirs")
    config = tmp_path / "theirs/config.json"
    config.write_text(config.read_text().replace('"n_layer": 1', '"n_layer": 2'))
    assert "transformer.h.1." in refused(capsys, 414, *line)
    path = tmp_path / "theirs/model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read" in refused(capsys, 414, *line)
    path.unlink()
    (tmp_path / "theirs/model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret"}}')
    assert "names a file elsewhere" in refused(capsys, 414, *line)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "code", "what"),
    [
        (lambda t: t | {"transformer.h.0.ln_1.weight": torch.full((40,), math.nan)}, 414, "is not finite in fp32"),
        (lambda t: t | {"transformer.h.0.ln_1.weight": torch.full((40,), math.inf)}, 414, "is not finite in fp32"),
        (
            lambda t: t | {"transformer.h.0.ln_1.weight": torch.full((40,), 1e300, dtype=torch.float64)},
            414,
            "is not finite",
        ),
        (lambda t: t | {"transformer.wpe.weight": torch.ones(40, 32)}, 414, "expected shape (32, 40), got (40, 32)"),
        (lambda t: t | {"transformer.h.0.attn.c_attn.weight": torch.ones(120, 40)}, 414, "expected shape (40, 120)"),
        (lambda t: t | {"transformer.h.0.attn.c_attn.weight": torch.ones(4800)}, 414, "got (4800,)"),
        (lambda t: t | {"transformer.wte.weight": torch.ones(401, 40)}, 414, "expected shape (400, 40), got (401, 40)"),
        (lambda t: t | {"transformer.h.0.adapter.weight": torch.ones(4)}, 414, "adapter.weight is in the files, but"),
        (lambda t: t | {"transformer.h.0.ln_1.weight": torch.ones(40, dtype=torch.int8)}, 415, "quantised weights"),
        (lambda t: t | {"transformer.h.0.ln_1.weight": torch.ones(40).to(torch.float8_e4m3fn)}, 415, "quantised"),
        (lambda t: {k: v for k, v in t.items() if "ln_f.bias" not in k}, 414, "transformer.ln_f.bias is missing"),
        (lambda t: {}, 414, "config.json has 2 layers, the files have 0 tensors"),
    ],
)
def test_weights_that_are_not_those_of_the_model(tmp_path: Path, capsys, change: Any, code: int, what: str) -> None:
    """Refused before anything is written, or taken away again, with the folders above that were made for it."""
    gpt2().save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    save_file({name: value.contiguous() for name, value in change(load_file(path)).items()}, path)
    out = tmp_path / "new/deep/run"
    found = refused(capsys, code, "import", "--from", "hf", "--model", tmp_path / "theirs", "--out", out)
    assert what in found, found
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("config.json", b"", "not JSON"),
        ("config.json", b"[]", "expected a JSON object, got list"),
        ("config.json", b"\xff\xfe", "not JSON"),
        ("config.json", b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        ("config.json", b'{"model_type": "gpt2", "n_layer": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        ("config.json", b'{"model_type": "gpt2", "resid_pdrop": NaN}', "NaN is not a JSON number"),
        ("config.json", b" " * (1 << 20) + b"{}", "expected at most 1,048,576 bytes"),
        ("model.safetensors", b"", "cannot be read"),
        ("model.safetensors", (1 << 62).to_bytes(8, "little") + b"{}", "cannot be read"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "cannot be read"),
        ("model.safetensors.index.json", b"{}", "has no weight_map of file names"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "has no weight_map of file names"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": ".."}}',
            "names a file elsewhere|cannot be read",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model.safetensors"}}',
            "a is not in model.safetensors",
        ),
    ],
)
def test_files_that_are_none_of_theirs(tmp_path: Path, capsys, file: str, content: bytes, what: str) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / file).write_bytes(content)
    line = line_of(tmp_path)
    assert re.search(what, refused(capsys, 414, *line))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_fifo_or_a_folder_in_the_place_of_a_file(tmp_path: Path, capsys, file: str) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / file
    line = line_of(tmp_path)
    for make, kind in ((os.mkfifo, "a FIFO"), (Path.mkdir, "a folder")):
        path.unlink()
        make(path)
        assert f"expected a regular file, got {kind}" in refused(capsys, 414, *line)
        path.rmdir() if path.is_dir() else None
        path.touch()


def test_absurd_numbers_of_layers_are_refused_at_once(tmp_path: Path, capsys) -> None:
    llama().save_pretrained(tmp_path / "theirs")
    for layers, code, what in (
        (10**9, 415, "num_hidden_layers: Input should be less than or equal to 4096, got 1000000000"),
        (4096, 414, "config.json has 4,096 layers, the files have 21 tensors"),
    ):
        edit(tmp_path, num_hidden_layers=layers)
        assert what in refused(capsys, code, *line_of(tmp_path))


def test_a_folder_that_is_there_is_not_imported_into(tmp_path: Path, capsys) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes").write_text("mine")
    line = line_of(tmp_path)
    assert "exists already" in refused(capsys, 110, *line)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes"]


def older_step(run: RunFolder, into: RunFolder) -> Path:
    """The step of another run as an older one of this run: whole, and under its own number."""
    source = Store(run.checkpoints).path(4)
    manifest = read_manifest(source)
    assert manifest.progress is not None
    progress = manifest.progress.model_copy(update={"updates": 3, "next_sample": 12, "row": None})
    target = Store(into.checkpoints).path(3)
    shutil.copytree(source, target)
    changed = manifest.model_copy(update={"step": 3, "progress": progress})
    (target / "manifest.json").write_bytes(changed.to_bytes())
    return target


def test_models_and_folders_that_cannot_be_exported(finished: RunFolder, tmp_path: Path, capsys) -> None:
    run = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    line = ("export", "--to", "hf", "--run", run.path, "--out", tmp_path / "out")
    (tmp_path / "out").mkdir()
    assert "exists already" in refused(capsys, 403, *line)
    (tmp_path / "out").rmdir()
    text = run.config.read_text()
    run.config.write_text(text.replace("norm: layernorm", "norm: rmsnorm"))
    assert "no family of transformers has this model: arcee: model.position learned would be rotary" in refused(
        capsys, 415, *line
    )
    assert "--as bert: not a family" in refused(capsys, 415, *line, "--as", "bert")
    run.config.write_text(text)
    shard = Store(run.checkpoints).path(4) / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "expected" in refused(capsys, 410, *line)
    older = older_step(finished, run)
    assert main([str(word) for word in line]) == 0
    said = capsys.readouterr()
    assert "; using an older step" in said.err and str(older) in said.out
    written = tmp_path / "out/model.safetensors"
    assert written.stat().st_mode == (tmp_path / "out/config.json").stat().st_mode
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(run.checkpoints)
    assert "no checkpoint" in refused(capsys, 402, *line)
    assert "not a run's folder" in refused(
        capsys, 113, "export", "--to", "hf", "--run", tmp_path, "--out", tmp_path / "o"
    )
    assert "invalid choice" in refused(
        capsys, 100, "export", "--to", "onnx", "--run", run.path, "--out", tmp_path / "o"
    )
    assert not (tmp_path / "out").exists()


def exported(run: RunFolder, out: Path) -> dict[str, Any]:
    """The config.json of an export."""
    assert main(["export", "--to", "hf", "--run", str(run.path), "--out", str(out)]) == 0
    return json.loads((out / "config.json").read_text())


def with_tokenizer(run: RunFolder, tokenizer: Path | None) -> RunFolder:
    """The same run, with another tokenizer in its config."""
    config = load(str(run.config))
    run.config.unlink()
    dump(
        config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer and str(tokenizer)})}),
        run.config,
    )
    return run


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_stops_at_the_tokenizers_end(tiny_data: TinyData, tmp_path: Path, name: str, capsys) -> None:
    """transformers' own defaults are ids of other vocabularies: GPT-2's is 50256, of 400."""
    model = MODELS[name]()
    ends = open_tokenizer(tiny_data.tokenizer)
    model.save_pretrained(tmp_path / "theirs")
    assert main(line_of(tmp_path)) == 0
    run = with_tokenizer(RunFolder(tmp_path / "run"), tiny_data.tokenizer)
    config = exported(run, tmp_path / "out")
    assert (config["bos_token_id"], config["eos_token_id"]) == (ends.bos, ends.eod)
    kind = transformers.AutoModelForCausalLM
    again = kind.from_pretrained(tmp_path / "out", dtype=torch.float32, local_files_only=True).eval()
    assert (again.generation_config.bos_token_id, again.generation_config.eos_token_id) == (ends.bos, ends.eod)

    def generated() -> list[int]:
        prompt = torch.tensor([[17, 18, 19]])
        mask = torch.ones_like(prompt)
        made = again.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        return made[0, 3:].tolist()

    assert len(generated()) == 8
    head = again.get_output_embeddings()  # from now on the end is by far the likeliest token
    head.register_forward_hook(lambda _module, _inputs, y: y.index_fill(-1, torch.tensor(ends.eod), 1e3))
    assert generated() == [ends.eod]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_tokenizer_no_end(tmp_path: Path, name: str, capsys) -> None:
    """Neither an id outside the vocabulary nor one that means something else in it."""
    MODELS[name]().save_pretrained(tmp_path / "theirs")
    assert main(line_of(tmp_path)) == 0
    run = with_tokenizer(RunFolder(tmp_path / "run"), None)
    capsys.readouterr()  # what transformers has said
    config = exported(run, tmp_path / "out")
    assert capsys.readouterr().err == ""
    assert {"bos_token_id", "eos_token_id"} <= config.keys()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    for part in (again.config, again.generation_config):
        assert part.bos_token_id is None and part.eos_token_id is None
    capsys.readouterr()
    run = with_tokenizer(run, tmp_path / "gone.model")
    config = exported(run, tmp_path / "again")
    assert config["bos_token_id"] is config["eos_token_id"] is None
    assert "tokenizer cannot be read" in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert "no eos and no bos" in said


def test_the_tokenizer_comes_in_and_goes_out(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    """transformers reads what goes out, with our ids; text is generated from what came in."""
    text = tiny_data.config.read_text()
    made = byte_level_bpe([text], 300, ["<|endoftext|>"])
    gpt2().save_pretrained(tmp_path / "theirs")
    made.save(str(tmp_path / "theirs/tokenizer.json"))
    run = RunFolder(tmp_path / "run")
    assert main(line_of(tmp_path)) == 0
    said = capsys.readouterr()
    assert f"with {run.path / 'tokenizer.json'}" in said.out and "data.tokenizer" not in said.out
    assert load(str(run.config)).data.tokenizer == str(run.path / "tokenizer.json")
    assert main(["generate", "--run", str(run.path), "--prompt", "steps: ", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("steps: ")
    config = exported(run, tmp_path / "out")
    assert config["eos_token_id"] == 0 and f"its tokenizer {run.path / 'tokenizer.json'}" in capsys.readouterr().out
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "theirs/tokenizer.json").read_bytes()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert again.encode(text) == open_tokenizer(run.path / "tokenizer.json").encode(text)
    assert (again.eos_token_id, again.bos_token_id) == (0, 0)


def test_weights_come_in_without_a_tokenizer_that_is_bad(tmp_path: Path, capsys) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer.json").write_text('{"model": ')
    run = RunFolder(tmp_path / "run")
    capsys.readouterr()
    assert main(line_of(tmp_path)) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "MZ-209" in said.err and "imported without a tokenizer" in said.err
    assert load(str(run.config)).data.tokenizer is None and "data.tokenizer" in said.out
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.yaml", "proof.json"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic': the angles would grow"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type ['yarn']"),
        ({"rope_parameters": 3}, "rope_parameters: "),
    ],
)
def test_other_angles_are_refused(tmp_path: Path, capsys, changes: dict[str, Any], what: str) -> None:
    llama().save_pretrained(tmp_path / "theirs")
    edit(tmp_path, **changes)
    assert what in refused(capsys, 415, *line_of(tmp_path))


def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path: Path, capsys) -> None:
    """A file that comes later by its name may hold another of that name."""
    model = gpt2()
    model.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    first = dict.fromkeys(tensors, path.name)
    second = first | {"transformer.h.0.ln_1.bias": "z.safetensors"}
    save_file(
        {name: tensors[name] + 9 * ("ln_f" in name) for name in ("transformer.ln_f.bias", "transformer.h.0.ln_1.bias")},
        tmp_path / "theirs/z.safetensors",
    )
    (tmp_path / "theirs/model.safetensors.index.json").write_text(json.dumps({"weight_map": second}))
    line = line_of(tmp_path)
    assert main([str(word) for word in line]) == 0
    assert (ours(RunFolder(tmp_path / "run"), TOKENS_BS) - model(TOKENS_BS).logits).abs().max() <= LOGITS
