"""What an import must not drop: heads, tensors, stop ids; and what it refuses, by the field that stands against it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megazero.__main__ import main
from megazero.config.file import load
from megazero.run.folder import RunFolder
from tests.tools.test_convert import LOGITS, TOKENS_BS, edit, gpt2, llama, ours, refused, tensors, theirs

MODELS: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


LINE = ("import", "--from", "hf", "--model", "theirs", "--out", "run")


def taken(*line: str) -> None:
    assert main(list(line)) == 0


def with_tensors(**more: Tensor) -> None:
    path = Path("theirs/model.safetensors")
    save_file(load_file(path) | {name.replace("__", "."): value for name, value in more.items()}, path)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_head_that_is_not_the_embedding_is_taken(kind: str, plain: bool, capsys) -> None:
    """As transformers does, whatever tie_word_embeddings says."""
    MODELS[kind](tie_word_embeddings=True).save_pretrained("theirs")
    hidden = 40 if kind == "gpt2" else 48
    with_tensors(lm_head__weight=torch.randn(400, hidden, generator=torch.Generator().manual_seed(3)) * 0.05)
    if plain:  # as GPT-2 is published
        path = Path("theirs/model.safetensors")
        save_file({name.removeprefix("transformer."): value for name, value in load_file(path).items()}, path)
    taken(*LINE)
    assert "untied, as lm_head.weight is not the embedding" in capsys.readouterr().out
    expected = theirs(Path("theirs"), TOKENS_BS)
    assert load("run/config.yaml").model.tie_embeddings is False
    assert (ours(RunFolder(Path("run")), TOKENS_BS) - expected).abs().max() <= LOGITS
    taken("export", "--to", "hf", "--run", "run", "--out", "again")
    assert torch.equal(theirs(Path("again"), TOKENS_BS), expected)


@pytest.mark.parametrize("kind", MODELS)
def test_a_head_that_is_the_embedding_stays_tied(kind: str, capsys) -> None:
    model = MODELS[kind](tie_word_embeddings=True)
    model.save_pretrained("theirs")
    with_tensors(lm_head__weight=model.get_input_embeddings().weight.detach().clone())
    taken(*LINE)
    assert "untied" not in capsys.readouterr().out and load("run/config.yaml").model.tie_embeddings is True
    taken("export", "--to", "hf", "--run", "run", "--out", "again")
    assert "lm_head.weight" not in tensors(Path("again"))
    assert torch.equal(theirs(Path("again"), TOKENS_BS), theirs(Path("theirs"), TOKENS_BS))


def test_a_head_of_another_size_is_refused(capsys) -> None:
    llama(tie_word_embeddings=True).save_pretrained("theirs")
    with_tensors(lm_head__weight=torch.ones(401, 48))
    assert "lm_head.weight: expected shape (400, 48), got (401, 48)" in refused(capsys, 414, *LINE)
    assert not Path("run").exists()


def test_a_tensor_that_the_index_leaves_out_is_not_dropped(capsys) -> None:
    """transformers loads whole files."""
    llama(tie_word_embeddings=True).save_pretrained("theirs")
    index = {"weight_map": dict.fromkeys(load_file("theirs/model.safetensors"), "model.safetensors")}
    Path("theirs/model.safetensors.index.json").write_text(json.dumps(index))
    with_tensors(model__layers__0__self_attn__q_norm__weight=torch.ones(8))
    assert "model.layers.0.self_attn.q_norm.weight is in the files" in refused(capsys, 414, *LINE)
    llama(tie_word_embeddings=True).save_pretrained("theirs")
    with_tensors(lm_head__weight=torch.ones(400, 48))
    taken(*LINE)
    assert load("run/config.yaml").model.tie_embeddings is False


def test_buffers_that_a_model_makes_itself_are_left_out(capsys) -> None:
    llama().save_pretrained("theirs")
    with_tensors(
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4), model__rotary_emb__inv_freq=torch.ones(4)
    )
    taken(*LINE)
    shutil.rmtree("run")
    with_tensors(model__layers__0__rotary_emb__inv_freqs=torch.ones(4))
    assert "inv_freqs is in the files" in refused(capsys, 414, *LINE)


def test_files_of_which_one_would_be_left_out(capsys) -> None:
    llama().save_pretrained("theirs", max_shard_size="20KB")
    save_file({"model.norm.weight": torch.ones(48)}, "theirs/model.safetensors")
    assert "the index does not name it: which is the model?" in refused(capsys, 414, *LINE)
    Path("theirs/model.safetensors").unlink()
    Path("theirs/adapter_config.json").write_text("{}")
    assert "adapter, whose weights would be left out; merge it" in refused(capsys, 414, *LINE)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic': the angles would grow"),
        ({"hidden_act": "gelu"}, "hidden_act gelu: our models have silu there"),
        ({"sparsity": 0.5}, "sparsity 0.5: the field is unknown, and may change what the model computes"),
        *(
            ({"model_type": kind}, f"model_type '{kind}' is not supported")
            for kind in ("mixtral", "qwen3_moe", "gemma3", "mamba", "bert")
        ),
    ],
)
def test_what_is_missing_is_named_with_the_way_round(changes: dict[str, Any], what: str, capsys) -> None:
    llama().save_pretrained("theirs")
    edit(Path(), **changes)
    said = refused(capsys, 415, *LINE)
    assert said.startswith("MZ-415 theirs/config.json: ") and what in said
    assert "train transformers' own class with megazero.shard" in said
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 500.0),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 500.0}, "rope_theta": 700.0}, 700.0),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 500.0}, "rope_theta": 700.0}, 500.0),
        ({"rope_scaling": {"rope_theta": 600.0}, "rope_parameters": {"rope_theta": 500.0}}, 600.0),
        ({"rope_parameters": None}, 10_000.0),
        ({"dtype": "bfloat16", "torch_dtype": "float16", "rope_parameters": None, "rope_theta": 500.0}, 500.0),
    ],
)
def test_angles_are_read_as_transformers_reads_them(changes: dict[str, Any], theta: float, capsys) -> None:
    llama().save_pretrained("theirs")
    edit(Path(), **changes)
    read = transformers.AutoConfig.from_pretrained("theirs", local_files_only=True)
    assert read.rope_parameters["rope_theta"] == theta
    taken(*LINE)
    assert load("run/config.yaml").model.rope_theta == theta


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "gpt2"])
def test_a_name_of_the_hub_is_downloaded_first(name: str, capsys) -> None:
    said = refused(capsys, 414, "import", "--from", "hf", "--model", name, "--out", "run")
    assert f"{name}: no such folder " in said and f"hf download {name} --local-dir FOLDER" in said


STOPS = {"bos_token_id": 1, "eos_token_id": [2, 7, 9], "temperature": 0.6}


@pytest.mark.parametrize("where", ["file", "config"])
def test_ids_that_stop_generation_come_in_and_go_out(where: str, capsys) -> None:
    llama().save_pretrained("theirs")
    Path("theirs/generation_config.json").unlink()
    if where == "file":
        Path("theirs/generation_config.json").write_text(json.dumps(STOPS))
    else:
        edit(Path(), eos_token_id=[2, 7, 9])
    taken(*LINE)
    taken("export", "--to", "hf", "--run", "run", "--out", "again")
    read = transformers.GenerationConfig.from_pretrained("again", local_files_only=True)
    assert read.eos_token_id == [2, 7, 9] and read.bos_token_id == 1
    assert where == "config" or read.temperature == 0.6


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"eos_token_id": NaN}'])
def test_a_generation_config_that_is_none_is_refused(content: bytes, capsys) -> None:
    llama().save_pretrained("theirs")
    Path("theirs/generation_config.json").write_bytes(content)
    assert "generation_config.json: cannot be read" in refused(capsys, 414, *LINE)
    assert not Path("run").exists()
