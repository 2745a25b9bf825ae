"""Every family comes in with a proof, is trained, and goes out with a proof; every planted mistake is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megazero.__main__ import main
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.config.model import Model, Rope
from megazero.model.batch_context import BatchContext
from megazero.tools.convert import fields, transformers_files
from megazero.tools.convert.families import Family, families
from megazero.tools.convert.interop import Theirs
from megazero.tools.convert.tensors import SAME, WAYS, Heads
from tests.tiny_run import TinyData, command
from tests.tools.convert.models import FAMILIES, SCALED, YARN, model_of
from tests.tools.test_convert import tensors
from tests.tools.test_import import with_tensors

QUICK = ("gpt2", "qwen2", "olmo2", "phi3", "gemma3_text", "cohere2", "gpt_neox")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def imported(*more: str) -> int:
    return main(["import", "--from", "hf", "--model", "theirs", "--out", "run", *more])


def exported(*more: str) -> int:
    return main(["export", "--to", "hf", "--run", "run", "--out", "again", *more])


def logits(folder: str) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None] * 7 % 400).logits


def test_every_family_has_a_model() -> None:
    assert families().keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in FAMILIES])
def test_in_and_out_again(name: str, capsys) -> None:
    model_of(name).save_pretrained("theirs")
    assert imported() == 0 and exported() == 0
    said = capsys.readouterr().out
    assert said.count("proven: logits of blocks 0, 1") == 2 and f"layers of {name}" in said and f" as {name}," in said
    assert torch.equal(logits("theirs"), logits("again"))
    proof = json.loads(Path("run/proof.json").read_text())
    assert proof["proven"] and proof["worst"] < 1e-12 and proof["whole_fp32"] < 1e-4 and proof["family"] == name


@pytest.mark.parametrize("name", ["qwen2", pytest.param("phi3", marks=pytest.mark.full)])
def test_sharded_bf16_files_come_back_bit_for_bit(name: str, capsys) -> None:
    model_of(name).to(torch.bfloat16).save_pretrained("theirs", max_shard_size="20KB")
    assert len(list(Path("theirs").glob("*.safetensors"))) > 3
    assert imported() == 0
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("precision:\n  dtype: fp32", "precision:\n  dtype: bf16"))
    assert exported() == 0 and capsys.readouterr().out.count("proven: logits of blocks 0, 1") == 2
    before, after = tensors(Path("theirs")), tensors(Path("again"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "gemma2" else pytest.mark.full) for n in FAMILIES])
def test_a_trained_model_goes_out(name: str, ranks: int, tiny_data: TinyData, capsys) -> None:
    model_of(name).save_pretrained("theirs")
    assert imported("--no-proof") == 0
    run, trained = Path("run").resolve(), Path("trained").resolve()
    options = (f"checkpoint.resume={run}", f"run.dir={trained}", "run.steps=3", f"data.train={tiny_data.train}")
    options += ("batch.global=4", "batch.micro=2", f"data.tokenizer={tiny_data.tokenizer}")
    done = command("train.py", "--config", f"{run}/config.yaml", "--nproc", str(ranks), *options)
    assert done.returncode == 0, done.stderr
    assert main(["export", "--to", "hf", "--run", "trained", "--out", "again", "--as", name]) == 0
    assert "proven: logits" in capsys.readouterr().out


Mistake = Callable[[pytest.MonkeyPatch], None]


def read_as(**options: Any) -> Mistake:
    """The model section is read with other options; a function gives one from the section."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = fields.model_from_theirs

        def wrong(theirs: Any, where: Path) -> Model:
            model = honest(theirs, where)
            values = model.model_dump()
            for name, value in options.items():
                values[name] = value(values[name]) if callable(value) else value
            return Model.model_validate(values)

        patch.setattr(transformers_files, "model_from_theirs", wrong)

    return plant


def kinds(change: Callable[[dict[str, Any]], object], only: str | None = None) -> Mistake:
    """Kinds of blocks are changed, all of them or one."""

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        for name, kind in given.items():
            if only in (None, name):
                change(kind)
        return given

    return read_as(layer_kinds=changed)


def rope(**values: Any) -> Mistake:
    return kinds(lambda kind: kind["rope"] and kind["rope"].update(values))


def plain_rope(kind: dict[str, Any]) -> None:
    kind["rope"] = Rope(theta=kind["rope"]["theta"]).model_dump()


def table(name: str, change: Callable[[Family], Family]) -> Mistake:
    def plant(patch: pytest.MonkeyPatch) -> None:
        wrong = families() | {name: change(families()[name])}
        patch.setattr(transformers_files, "families", lambda: wrong)

    return plant


def swapped(one: str, other: str) -> Callable[[Family], Family]:
    """Two rows have each other's tensors."""
    return lambda family: replace(family, rows={**family.rows, one: family.rows[other], other: family.rows[one]})


def way(row: str, of: Any) -> Callable[[Family], Family]:
    return lambda family: replace(family, rows={**family.rows, row: (family.rows[row][0], of)})


def tiled(patch: pytest.MonkeyPatch) -> None:
    """Query heads are dealt to groups in turn."""
    honest = Heads.grouped

    def wrong(self: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dealt = q.unflatten(0, (self.per_group, self.kv_heads, self.head_dim)).transpose(0, 1).flatten(0, 2)
        return honest(self, dealt, k, v)

    patch.setattr(Heads, "grouped", wrong)


def leaking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchContext, "within_documents", lambda self, positions, _: replace(self, positions_SB=positions))


def shifted(pattern: tuple[str, ...]) -> tuple[str, ...]:
    return (*pattern[1:], pattern[0])


HALF = "blocks.{i}.attention.q_norm.weight", "blocks.{i}.attention.k_norm.weight"
MISTAKES: dict[str, tuple[str, Mistake]] = {  # the family, and the mistake; numbers as in the table of docs/models.md
    "interleaved as halves": ("glm4", table("glm4", lambda family: replace(family, interleaved=False))),
    "share ignored": ("glm4", rope(share=1.0)),
    "llama3 as plain": ("llama", kinds(plain_rope)),
    "yarn without its factor": ("arcee", rope(attention_factor=1.0)),
    "truncate flipped": ("olmo2", rope(truncate=True)),
    "no QK-norm": ("qwen3", read_as(qk_norm="none")),
    "QK-norm before rotation": ("hunyuan_v1_dense", read_as(qk_norm_at="before")),
    "q and k norm swapped": ("qwen3", table("qwen3", swapped(*HALF))),
    "window one longer": ("mistral", kinds(lambda kind: kind.update(window=8))),
    "window one shorter": ("starcoder2", kinds(lambda kind: kind.update(window=6))),
    "full layers a block early": ("gemma3_text", read_as(layer_pattern=shifted)),
    "window in the first blocks": ("qwen2", read_as(layer_pattern=lambda pattern: pattern[::-1])),
    "still blocks a block early": ("smollm3", read_as(layer_pattern=shifted)),
    "rope in still blocks": ("exaone4", kinds(lambda kind: kind.update(rope=Rope().model_dump()), "still")),
    "theta of the other kind": ("gemma3_text", kinds(lambda kind: kind["rope"].update(theta=1e6), "local")),
    "scaling in local blocks": (
        "olmo3",
        kinds(lambda kind: kind["rope"].update(kind="linear", factor=2.0), "local"),
    ),
    "w for 1 + w": ("gemma2", read_as(norm_offset=0)),
    "attention scale": ("granite", read_as(attention_scale=None)),
    "no embedding scale": ("granite", read_as(embedding_scale=1.0)),
    "embedding scale in bf16": ("gemma2", read_as(embedding_scale=6.9375)),
    "logits times": ("granite", read_as(logit_scale=8.0)),
    "no attention cap": ("gemma2", read_as(softcap={"attention": None, "logits": 30.0})),
    "erf for tanh": ("starcoder2", read_as(activation="gelu_erf")),
    "eps of another family": ("glm4", read_as(norm_eps=1e-6)),
    "gate and up swapped": ("llama", table("llama", swapped("blocks.{i}.mlp.gate.{part}", "blocks.{i}.mlp.up.{part}"))),
    "norms confused": (
        "glm4",
        table("glm4", swapped("blocks.{i}.mlp_norm.{part}", "blocks.{i}.attention_post_norm.{part}")),
    ),
    "qkv not by head": ("gpt_neox", table("gpt_neox", way("blocks.{i}.attention.qkv.{part}", WAYS["joined_qkv"]))),
    "query groups tiled": ("llama", tiled),
    "square weight turned": ("gpt2", table("gpt2", way("blocks.{i}.attention.out.{part}", WAYS["turned"]))),
    "weight not turned": ("gemma2", table("gemma2", way("blocks.{i}.attention.out.{part}", SAME))),
    "bias dropped": ("qwen2", read_as(bias={"qkv": False})),
    "serial for parallel": ("gpt_neox", read_as(residual="serial")),
    "parallel norms swapped": (
        "gpt_neox",
        table("gpt_neox", swapped("blocks.{i}.attention_norm.{part}", "blocks.{i}.mlp_norm.{part}")),
    ),
    "differing head dropped": ("qwen3", lambda patch: patch.setattr(Theirs, "has_other_head", lambda self: False)),
    "no query scale": ("ministral3", read_as(query_scale=None)),
    "short for long": ("phi3", kinds(lambda kind: kind["rope"].update(long=kind["rope"]["short"]))),
    "documents leak": ("llama", leaking),
}
SLOW = [name for i, name in enumerate(MISTAKES) if i % 3]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in MISTAKES])
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    family, plant = MISTAKES[name]
    changes = {"rope_parameters": {"full_attention": YARN | SCALED}} if name == "scaling in local blocks" else {}
    model = model_of(family, **changes)
    model.save_pretrained("theirs")
    if name == "differing head dropped":
        with_tensors(lm_head__weight=torch.randn(400, 48))
    plant(monkeypatch)
    capsys.readouterr()  # what transformers has said
    assert imported() == 1
    line = capsys.readouterr().err
    assert line.startswith("MZ-41") and not Path("run").exists(), line
    if line.startswith("MZ-416"):
        assert "the outputs of block" in line or "the embedded tokens" in line or "the logits, by" in line
    else:
        assert name in ("no QK-norm", "bias dropped", "weight not turned"), line


def test_a_mistake_of_an_export_is_found(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    model_of("gemma3_text").save_pretrained("theirs")
    assert imported("--no-proof") == 0
    assert "not proven: not asked for" in capsys.readouterr().out
    honest = fields.to_theirs
    monkeypatch.setattr(transformers_files, "to_theirs", lambda *given: honest(*given) | {"sliding_window": 8})
    assert exported() == 1
    assert capsys.readouterr().err.startswith("MZ-416: the logits at positions 0 to 23 differ by ")
    assert not Path("again").exists()
    assert exported("--no-proof") == 0


def test_a_model_goes_out_as_any_family_that_fits(capsys) -> None:
    model_of("llama", rope_parameters=None, attention_bias=False, mlp_bias=False).save_pretrained("theirs")
    assert imported("--no-proof") == 0
    for name in ("llama", "mistral"):
        assert main(["export", "--to", "hf", "--run", "run", "--out", name, "--as", name]) == 0
        assert f"as {name}, 1 file; proven" in capsys.readouterr().out
    assert exported("--as", "olmo2") == 1
    assert "MZ-415: the family olmo2: model." in capsys.readouterr().err


def test_blocks_of_a_trained_run_are_read_again() -> None:
    model_of("olmo3").save_pretrained("theirs")
    assert imported("--no-proof") == 0
    assert load("run/config.yaml").model.layer_pattern == ("local", "local", "local", "full")
    assert Store(Path("run/checkpoints")).steps() == [0]


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5: transformers' models of this family do not",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0}}, "alpha 50.0: transformers' models of"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act ['silu']: our models have silu there"),
        ("llama", {"hidden_size": 50, "head_dim": 12}, "hidden_size 50 is no multiple of 4 heads"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types ['full_attention'"),
        (
            "olmo3",
            {"rope_parameters": {"rope_theta": 500.0}},
            "rope_parameters: expected sliding_attention and full_att",
        ),
        ("ministral3", {"rope_parameters": None}, "rope_parameters is missing"),
        ("gemma2", {"query_pre_attn_scalar": 9.5}, "query_pre_attn_scalar: expected a number, got 9.5"),
        ("gemma2", {"sliding_window_pattern": 3}, "sliding_window_pattern 3"),
        ("qwen2", {"use_mrope": True}, "use_mrope True: our models have False"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers: expected 4 of 0 and 1, got [1, 1]"),
        ("exaone4", {"layer_types": ["full_attention"]}, "layer_types: expected 4 of sliding_attention and full_atten"),
        ("gpt_neox", {"attention_bias": None}, "transformers cannot compute this model: StrictDataclass"),
    ],
)
def test_values_that_transformers_reads_otherwise_are_refused(
    family: str, changes: dict[str, Any], what: str, capsys
) -> None:
    model_of(family).save_pretrained("theirs")
    path = Path("theirs/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    capsys.readouterr()
    assert imported() == 1
    line = capsys.readouterr().err
    assert line.startswith("MZ-415") and what in line and line.count("\n") == 1 and not Path("run").exists()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_mrope": False}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "auto_map": {}}),
        ("cohere2", {"use_parallel_block": True, "layer_switch": 4, "position_embedding_type": "rope_gptj"}),
        ("gemma3_text", {"_sliding_window_pattern": 3}),
        ("glm4", {"partial_rotary_factor": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("olmo2", {"rope_parameters": {**YARN, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.0}}),
        ("gpt2", {"n_positions": 64, "n_ctx": 64, "summary_type": "cls_index"}),
    ],
)
def test_published_fields_are_read_as_transformers_reads_them(family: str, changes: dict[str, Any], capsys) -> None:
    model_of(family).save_pretrained("theirs")
    path = Path("theirs/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert imported() == 0, capsys.readouterr().err
    assert "proven: logits" in capsys.readouterr().out


def test_exports_hold_what_transformers_before_5_reads() -> None:
    """It knows no rope_parameters: bases and scaling of kinds are written under the older names too."""
    model_of("gemma3_text").save_pretrained("theirs")
    assert imported("--no-proof") == 0 and exported("--no-proof") == 0
    written = json.loads(Path("again/config.json").read_text())
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (1e6, 1e4)
